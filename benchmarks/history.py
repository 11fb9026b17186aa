"""Cost of a streaming step after 0, 10 and 60 s of history: read in place, against gathered anew.

    python benchmarks/history.py [--streams 8] [--dtype bfloat16] [--threads 2]

The Conformer of ``conformer_encoder.py`` with unlimited left context. ``in place`` is what the engine does where a
stream's blocks are contiguous (they are); ``gathered`` is the same step over a scattered block table.
"""

from __future__ import annotations

import argparse
import time

import torch
from conformer_encoder import CHUNK, streaming_step

from oasr_conformer.random_weights import random_config, random_model


def best(call, seconds: float) -> float:
    """Shortest of several calls, in milliseconds."""
    call()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest * 1e3


def main() -> None:
    """Print one line for each length of history."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = random_model(random_config(), dtype=getattr(torch, options.dtype))
    print(f"{options.streams} streams, {options.dtype}, {options.threads} threads, {CHUNK} frames a step")
    print(f"{'history':>10} {'in place ms':>12} {'gathered ms':>12}")
    with torch.inference_mode():
        for seconds in (0, 10, 60):
            frames = seconds * 25 // CHUNK * CHUNK
            call, store = streaming_step(model, options.streams, frames, -1)
            in_place = best(call, options.seconds)
            cache = store.attention
            cache._home = cache._home[::-1].copy()  # the table stays, but no block is where it would be read in place
            gathered = best(call, options.seconds)
            print(f"{seconds:>8} s {in_place:12.1f} {gathered:12.1f}", flush=True)


if __name__ == "__main__":
    main()
