"""Speed of a Conformer of real size with random weights, as a share of the matrix-multiplication limit.

    python benchmarks/conformer_encoder.py [--dtype bfloat16 float32] [--threads 2]
        [--offline 1 8 32] [--streams 1 8 32] [--seconds 3]

12 blocks, d=512, 8 heads, feed forward 2048, kernel 15, vocabulary 5000; utterances of 10 s; streaming steps of 16
encoder frames with 4 left chunks, and with 10 s of history. Encoder and CTC log posteriors are timed, features are not.
The limit is ``1024x512 @ 512x2048`` in the same dtype, measured between the repetitions of every line; operations are
counted from shapes (padding and what is computed twice at window borders do not count). Best of several repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from oasr_conformer.random_weights import random_config, random_model
from oasr_core.cache.options import CacheOptions
from oasr_core.cache.sizing import build_cache_config
from oasr_core.cache.store import StreamStateStore
from oasr_core.models.base import ChunkBatch, EncoderBatch, PagedKV, Slot

FRAMES_10S = 998
FRAME_SECONDS = 0.01
CHUNK = 16


def flops(config: dict, frames: int, keys: int) -> float:
    """Operations for ``frames`` encoder frames that attend to ``keys`` keys each (multiply and add count as two)."""
    e = config["encoder"]
    d, ff, kernel = e["output_size"], e["linear_units"], e["conv_kernel"]
    block = 2 * (4 * d * ff + 4 * d * d + 3 * d * d + kernel * d) + 4 * keys * d
    subsampling = 2 * (2 * 39 * 9 * d + 19 * 9 * d * d + 19 * d * d)
    return frames * (e["num_blocks"] * block + subsampling + 2 * d * config["vocab_size"])


class Timer:
    """Best wall-clock time of a call, with the limit measured in turns with it."""

    def __init__(self, dtype: torch.dtype, seconds: float) -> None:
        self.seconds = seconds
        a, b = torch.randn(1024, 512, dtype=dtype), torch.randn(512, 2048, dtype=dtype)
        self._limit = lambda: a @ b
        self._limit_ops = 2 * 1024 * 512 * 2048

    def run(self, call: Callable[[], object]) -> tuple[float, float]:
        """Seconds of ``call`` and the limit in operations a second."""
        best, limit = float("inf"), float("inf")
        call()
        end = time.perf_counter() + self.seconds
        repetitions = 0
        while time.perf_counter() < end or repetitions < 3:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
            for _ in range(5):
                start = time.perf_counter()
                self._limit()
                limit = min(limit, time.perf_counter() - start)
            repetitions += 1
        return best, self._limit_ops / limit


def offline(model, batch: int) -> tuple[Callable[[], object], float, float]:
    """The call, its audio seconds and its operations."""
    features = torch.randn(batch, FRAMES_10S, 80)
    lengths = torch.full((batch,), FRAMES_10S)
    frames = model.encoder.output_frames(FRAMES_10S)

    def call() -> None:
        model.ctc.log_probs(model.encoder.encode(EncoderBatch(features, lengths)).hidden)

    return call, batch * FRAMES_10S * FRAME_SECONDS, flops(model.config.model_dump(), batch * frames, frames)


def streaming_step(
    model, streams: int, history: int, left_chunks: int
) -> tuple[Callable[[], object], StreamStateStore]:
    """A step in the steady state: ``history`` frames are cached, and each call overwrites the same step."""
    encoder = model.encoder
    geometry = encoder.chunk_geometry(CHUNK)
    specs = encoder.state_specs
    dtype = encoder.after_norm.weight.dtype
    cache = build_cache_config(
        next(spec for spec in specs if isinstance(spec, PagedKV)), CacheOptions(),
        chunk_size=CHUNK, num_left_chunks=left_chunks, max_streams=streams, element_size=dtype.itemsize,
    )  # fmt: skip
    slots = [spec for spec in specs if isinstance(spec, Slot)]
    store = StreamStateStore(cache, slots, max_streams=streams, dtype=dtype, device=torch.device("cpu"))
    names = [str(index) for index in range(streams)]
    for name in names:
        store.allocate(name)
    features = torch.randn(streams, geometry.window, 80)
    counts = np.full(streams, CHUNK)

    def step(offset: int) -> None:
        offsets = np.full(streams, offset)
        batch = ChunkBatch(
            features=features,
            valid=torch.full((streams,), geometry.window),
            offsets=torch.from_numpy(offsets),
            out_lengths=torch.from_numpy(counts),
            state=store.cohort(names, offsets, counts, CHUNK),
            uniform=offset,
        )
        model.ctc.log_probs(encoder.encode_chunk(batch).hidden)

    for offset in range(0, history, CHUNK):
        step(offset)
    return lambda: step(history), store


def streaming(model, streams: int, history: int, left_chunks: int) -> tuple[Callable[[], object], float, float]:
    """The call, its audio seconds and its operations."""
    call, _ = streaming_step(model, streams, history, left_chunks)
    audio = streams * model.encoder.chunk_geometry(CHUNK).stride * FRAME_SECONDS
    return call, audio, flops(model.config.model_dump(), streams * CHUNK, history + CHUNK)


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--offline", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each line")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = random_config()
    print(f"torch {torch.__version__}, {options.threads} threads")
    print(f"{'dtype':9} {'work':34} {'ms':>8} {'RTFx':>7} {'GFLOP/s':>8} {'limit':>7} {'share':>6}")
    for name in options.dtype:
        dtype = getattr(torch, name)
        model = random_model(config, dtype=dtype)
        timer = Timer(dtype, options.seconds)
        work = [(f"offline, {n} x 10 s", offline, (n,)) for n in options.offline]
        for n in options.streams:
            work.append((f"{n} streams x 16 frames, 64 before", streaming, (n, 64, 4)))
            work.append((f"{n} streams x 16 frames, 256 before", streaming, (n, 256, -1)))
        for label, make, arguments in work:
            with torch.inference_mode():
                call, audio, operations = make(model, *arguments)
                seconds, limit = timer.run(call)
            speed = operations / seconds
            print(
                f"{name:9} {label:34} {seconds * 1e3:8.1f} {audio / seconds:7.1f} {speed / 1e9:8.0f} "
                f"{limit / 1e9:7.0f} {speed / limit:6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
