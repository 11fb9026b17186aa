"""Transducer search: microseconds a frame, greedy and modified beam, next to the joiner's own matrix products.

    python benchmarks/transducer_search.py [--threads 1]

Random networks of icefall's default size (V=500, encoder and joiner 512, context 2); 250 frames a row; the joiner's
bias makes most frames blank. ``joiner`` is the output layer alone, batched over rows as the search has to.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import torch

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_transducer.networks import Joiner, StatelessPredictor, Transducer
from oasr_transducer.options import TransducerOptions
from oasr_transducer.strategy import TransducerStrategy

VOCAB, DIM, FRAMES = 500, 512, 250


def networks() -> Transducer:
    """Reproducible random networks."""
    torch.manual_seed(0)
    predictor, joiner = StatelessPredictor(VOCAB, DIM, 2).eval(), Joiner(DIM, DIM, DIM, VOCAB).eval()
    with torch.no_grad():
        joiner.output_linear.weight.mul_(12)
        joiner.output_linear.bias[0] = 12.5
    for network in (predictor, joiner):
        network.requires_grad_(False)
    predictor.prepare()
    return Transducer(predictor, joiner, VOCAB, blank_id=0, unk_id=2)


def best(call, seconds: float = 2.0) -> float:
    """Shortest of several calls, seconds."""
    call()
    shortest, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begun = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - begun)
    return shortest


def main() -> None:
    """Print one line for each search and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    interface = networks()
    model = SimpleNamespace(interfaces={"transducer": interface})
    print(f"{'search':12} {'rows':>5} {'us a frame':>11} {'joiner':>8}  blank frames")
    for name, options in (("greedy", {"search": "greedy"}), ("beam 4", {"search": "beam", "beam_size": 4})):
        strategy = TransducerStrategy(DecodeContext(model, ByteTokenizer(), TransducerOptions(**options)))
        for rows in (1, 8, 32):
            generator = torch.Generator().manual_seed(rows)
            hidden = torch.randn(rows, FRAMES, DIM, generator=generator)
            out = EncoderOutput(hidden, torch.full((rows,), FRAMES))
            asked = [DecodingOptions()] * rows
            with torch.inference_mode():
                took = best(lambda s=strategy, o=out, a=asked: s.decode_offline(o, a))
                said = strategy.decode_offline(out, asked)
                width = rows * (4 if name != "greedy" else 1)
                sample = torch.randn(width, DIM)
                alone = best(lambda x=sample: interface.joiner.output_linear(x), 0.5)
            spoken = sum(len(hyps.best.tokens) for hyps in said) / (rows * FRAMES)
            print(f"{name:12} {rows:5} {took / rows / FRAMES * 1e6:11.1f} {alone / rows * 1e6:8.1f}  {1 - spoken:6.0%}")


if __name__ == "__main__":
    main()
