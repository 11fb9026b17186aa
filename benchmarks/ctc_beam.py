"""Speed of CTC prefix beam search on the CPU, one thread.

    python benchmarks/ctc_beam.py [--vocab 5000] [--beam 10] [--seconds 2] [--pyctcdecode PYTHON]

Posteriors are made: 250 frames, 70 % of them blank with a posterior of 0.98 and more, the others with a token of 0.5
to 0.99; every other label has a share of the rest that is spread over four powers of ten. Timed are the whole decoder
of one utterance (from log posteriors to lists), the same without skipping blank frames, with WeNet's first pruning,
with 100 hotwords; ``torch.topk`` of ``beam`` labels alone; and a step of 32 streams by 16 frames, in the order in which
an engine would run it. Best of several repetitions, microseconds a frame. ``--pyctcdecode`` names an interpreter that
has pyctcdecode, which decodes the same posteriors without language model, ``beam_width`` as ours.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy

FRAMES = 250
STREAMS, CHUNK = 32, 16

RIVAL = """
import sys, time
import numpy as np
from pyctcdecode import build_ctcdecoder
log_probs, beam = np.load(sys.argv[1]), int(sys.argv[2])
labels = [""] + [chr(0x4E00 + i) for i in range(log_probs.shape[1] - 1)]
decoder = build_ctcdecoder(labels)
times = []
for _ in range(5):
    begun = time.perf_counter()
    decoder.decode_beams(log_probs, beam_width=beam)
    times.append(time.perf_counter() - begun)
print(min(times))
"""


def posteriors(frames: int, vocab: int, seed: int) -> Tensor:
    """``(frames, vocab)`` log posteriors, 70 % of the frames surely blank."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(1, vocab, (frames,), generator=generator)
    share = 0.5 + 0.49 * torch.rand(frames, generator=generator)
    blank = torch.rand(frames, generator=generator) < 0.7
    label[blank], share[blank] = 0, 0.98 + 0.0199 * torch.rand(int(blank.sum()), generator=generator)
    rest = 10 ** (-4 * torch.rand(frames, vocab, generator=generator))
    rest[torch.arange(frames), label] = 0.0
    probs = rest / rest.sum(1, keepdim=True) * (1 - share)[:, None]
    probs[torch.arange(frames), label] = share
    return probs.log()


def best_of(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest call."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def build(vocab: int, **options: object) -> CtcStrategy:
    model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=0, vocab_size=vocab)})
    return CtcStrategy(DecodeContext(model, ByteTokenizer(), CtcOptions(**options)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=5000)
    parser.add_argument("--beam", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--pyctcdecode", metavar="PYTHON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    build(args.vocab, beam_size=args.beam)
    print(
        f"first construction (import of numba, compilation or load from the cache): {time.perf_counter() - begun:.2f} s"
    )

    log_probs = posteriors(FRAMES, args.vocab, 0)
    blank = (log_probs[:, 0].exp() >= 0.98).float().mean()
    print(f"{FRAMES} frames, V={args.vocab}, beam {args.beam}, {blank:.0%} blank; microseconds a frame")
    out = EncoderOutput(log_probs[None], torch.tensor([FRAMES]), log_probs[None])
    hotwords = [{"phrase": f"{chr(97 + i % 26)}{chr(97 + i // 4)}xyz"} for i in range(100)]
    variants: dict[str, tuple[dict[str, object], DecodingOptions]] = {
        "defaults": ({}, DecodingOptions()),
        "no frame skipped": ({"blank_threshold": 1.0}, DecodingOptions()),
        "WeNet's first pruning, no frame skipped": (
            {"blank_threshold": 1.0, "first_beam_size": args.beam},
            DecodingOptions(),
        ),
        "100 hotwords": ({}, DecodingOptions(hotwords=hotwords)),
        "greedy": ({"search": "greedy"}, DecodingOptions()),
    }
    for name, (options, wanted) in variants.items():
        if options.get("search") != "greedy":
            options = {"beam_size": args.beam, **options}
        strategy = build(args.vocab, **options)
        seconds = best_of(lambda s=strategy, w=wanted: s.decode_offline(out, [w]), args.seconds)
        print(f"  {name:42s} {seconds / FRAMES * 1e6:8.2f}")
    print(f"  {'torch.topk alone':42s} {best_of(lambda: log_probs.topk(args.beam), args.seconds) / FRAMES * 1e6:8.2f}")
    if args.pyctcdecode:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "log_probs.npy"
            np.save(path, log_probs.numpy())
            run = [args.pyctcdecode, "-c", RIVAL, str(path), str(args.beam)]
            seconds = float(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
        print(f"  {'pyctcdecode':42s} {seconds / FRAMES * 1e6:8.2f}")

    strategy = build(args.vocab, beam_size=args.beam)
    steps = torch.stack([posteriors(CHUNK * 10, args.vocab, seed) for seed in range(STREAMS)])
    chunks = [steps[:, start : start + CHUNK].contiguous() for start in range(0, CHUNK * 10, CHUNK)]
    times: list[float] = []
    end = time.perf_counter() + args.seconds
    while time.perf_counter() < end or not times:
        sessions = [strategy.open(DecodingOptions()) for _ in range(STREAMS)]
        for chunk in chunks:
            step = EncoderOutput(chunk, torch.full((STREAMS,), CHUNK), chunk)
            begun = time.perf_counter()
            strategy.decode_chunk(sessions, step, [False] * STREAMS)
            times.append(time.perf_counter() - begun)
        for session in sessions:
            strategy.close(session)
    print(
        f"a step of {STREAMS} streams x {CHUNK} frames: median {np.median(times) * 1e3:.2f} ms, "
        f"best {min(times) * 1e3:.2f} ms, {np.median(times) / STREAMS / CHUNK * 1e6:.2f} us a frame"
    )


if __name__ == "__main__":
    main()
