"""The whole engine on a Conformer of real size with random weights, as a share of the matrix-multiplication limit.

    python benchmarks/engine.py [--dtype bfloat16 float32] [--threads 2] [--offline 1 8 32] [--streams 1 8 32]

12 blocks, d=512, 8 heads, feed forward 2048, kernel 15, vocabulary 5000; recordings of 10 s of noise; features,
encoder, CTC head, greedy search and text included. Streams advance in step, as fast as they are served, with
unlimited left context (16 frames of 40 ms a step). The limit is ``1024x512 @ 512x2048`` in the same dtype, measured
between the repetitions; operations are counted from shapes. ``other`` is the time in ``step()`` outside features,
forward and decode.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from conformer_encoder import flops

from oasr_conformer.model import ConformerModel
from oasr_conformer.random_weights import random_config
from oasr_core import ASREngine, EngineConfig
from oasr_core.checkpoints.bundle import CheckpointBundle, FeatureSpec, TokenizerSpec
from oasr_core.checkpoints.native import save_native

SECONDS = 10
FRAMES = 998


def write_bundle(directory: Path) -> dict:
    """A native bundle with random weights; returns the network's configuration."""
    config = random_config()
    torch.manual_seed(0)
    model = ConformerModel.from_config(config)
    symbols = directory.parent / "units.txt"
    names = ["<blank>", "<unk>", *(f"▁w{i}" for i in range(2, config["vocab_size"]))]
    symbols.write_text("".join(f"{name} {i}\n" for i, name in enumerate(names)), encoding="utf8")
    save_native(
        CheckpointBundle(
            "conformer",
            config,
            model.state_dict(),
            TokenizerSpec("symbol_table", {"symbols": symbols}),
            FeatureSpec(),
        ),
        directory,
    )
    return config


class Stages:
    """Wall-clock seconds per stage of the step loop."""

    def __init__(self, engine: ASREngine) -> None:
        self.seconds: dict[str, float] = {}
        parts = engine._parts
        self._wrap(parts.inputs, "extract", "features")
        self._wrap(parts.inputs, "extract_streaming_batch", "features")
        self._wrap(parts.runner, "forward_offline", "forward")
        self._wrap(parts.runner, "forward_streaming", "forward")
        self._wrap(parts.strategy, "decode_offline", "decode")
        self._wrap(parts.strategy, "decode_chunk", "decode")

    def _wrap(self, owner: object, name: str, stage: str) -> None:
        original = getattr(owner, name)

        def timed(*args, **kwargs):
            with self.measure(stage):
                return original(*args, **kwargs)

        setattr(owner, name, timed)

    @contextmanager
    def measure(self, stage: str):
        begun = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - begun


def limit(dtype: torch.dtype) -> float:
    """Best of a few matrix products, operations a second."""
    a, b = torch.randn(1024, 512, dtype=dtype), torch.randn(512, 2048, dtype=dtype)
    best = float("inf")
    for _ in range(20):
        begun = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - begun)
    return 2 * 1024 * 512 * 2048 / best


def measure(engine: ASREngine, stages: Stages, clips: list[torch.Tensor], streaming: bool, seconds: float, dtype):
    """Best repetition: seconds, its stages, and the limit beside it."""
    best, split, top = float("inf"), {}, 0.0
    engine.transcribe_outputs(clips, streaming=streaming)
    end = time.perf_counter() + seconds
    turns = 0
    while time.perf_counter() < end or turns < 2:
        turns += 1
        stages.seconds = {}
        begun = time.perf_counter()
        engine.transcribe_outputs(clips, streaming=streaming)
        took = time.perf_counter() - begun
        if took < best:
            best, split = took, dict(stages.seconds)
        top = max(top, limit(dtype))
    return best, split, top


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--offline", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each line")
    parser.add_argument("--set", nargs="*", default=[], metavar="K=V", help="further engine options")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clips = [0.05 * torch.randn(SECONDS * 16000, generator=torch.Generator().manual_seed(i)) for i in range(32)]
    print(f"torch {torch.__version__}, {options.threads} threads")
    print(f"{'dtype':9} {'work':22} {'ms':>8} {'RTFx':>7} {'share':>6}  features forward decode other")
    with tempfile.TemporaryDirectory() as folder:
        config = write_bundle(Path(folder) / "bundle")
        for name in options.dtype:
            dtype = getattr(torch, name)
            settings = {"decode_options": {"search": "greedy"}, "max_batch_size": 32, "device": "cpu", "dtype": name}
            settings |= dict(item.split("=", 1) for item in options.set)
            with ASREngine(EngineConfig(ckpt_dir=Path(folder) / "bundle", **settings)) as engine:
                stages = Stages(engine)
                frames = engine._parts.runner.encoder.output_frames(FRAMES)
                work = [(f"offline, {n} x {SECONDS} s", n, False) for n in options.offline]
                work += [(f"{n} streams", n, True) for n in options.streams]
                for label, n, streaming in work:
                    took, split, top = measure(engine, stages, clips[:n], streaming, options.seconds, dtype)
                    keys = frames / 2 if streaming else frames
                    share = flops(config, n * frames, keys) / took / top
                    known = [split.get(stage, 0.0) / took for stage in ("features", "forward", "decode")]
                    print(
                        f"{name:9} {label:22} {took * 1e3:8.1f} {n * SECONDS / took:7.1f} {share:6.1%}  "
                        + " ".join(f"{part:7.1%}" for part in [*known, 1 - sum(known)]),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
