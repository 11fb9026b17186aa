"""Speed of icefall's default Zipformer2 with random weights, as a share of the matrix-multiplication limit.

    python benchmarks/zipformer_encoder.py [--dtype bfloat16 float32] [--threads 2]
        [--offline 1 8 32] [--streams 1 8 32 64] [--seconds 3]

The medium model (65 million parameters), vocabulary 500; utterances of 10 s; streaming steps of 16 encoder frames
(icefall's chunk 32) with 128 front-end frames of left context. Encoder and CTC log posteriors are timed, features are
not. The limit is ``1024x512 @ 512x2048`` in the same dtype, measured between the repetitions of every line; operations
are counted from shapes; padding and what is computed twice at window borders do not count. The best repetition counts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
import torch
from conformer_encoder import Timer

from oasr_core.cache.store import StreamStateStore
from oasr_core.models.base import ChunkBatch, EncoderBatch, Slot
from oasr_zipformer.config import ZipformerConfig
from oasr_zipformer.random_weights import random_config, random_model

FRAMES_10S = 1000
FRAME_SECONDS = 0.01
CHUNK = 16


def flops(config: ZipformerConfig, frames: int, keys: int) -> float:
    """Operations for ``frames`` front-end frames that attend to ``keys`` of them each (multiply and add are two)."""
    encoder = config.encoder
    first, second, third = encoder.embed_channels
    width = encoder.embed_width
    total = 2 * (80 * 9 * first * 2 + (2 * width + 1) * 9 * first * second + width * 9 * second * third)
    total += 2 * width * third * (49 + 6 * third + encoder.stacks[0].dim)
    for stack in encoder.stacks:
        d, kernel = stack.dim, stack.conv_kernel
        scores = stack.num_heads * (stack.query_head_dim + stack.pos_head_dim)
        values = 2 * stack.num_heads * stack.value_head_dim
        weights = stack.num_heads * (2 * stack.query_head_dim + stack.pos_head_dim)
        linear = d * (weights + 2 * 3 * stack.feedforward_dim + 4 * stack.nonlin_dim + 2 * values + 2 * 3 * d)
        layer = 2 * (linear + 2 * kernel * d + keys // stack.downsampling * (scores + values + stack.nonlin_dim))
        total += stack.num_layers * layer / stack.downsampling
    return frames * (total + encoder.output_dim * config.vocab_size)


def offline(model, batch: int) -> tuple[Callable[[], object], float, float]:
    """The call, its audio seconds and its operations."""
    features = torch.randn(batch, FRAMES_10S, 80) - 8
    lengths = torch.full((batch,), FRAMES_10S)
    frames = (FRAMES_10S - 7) // 2

    def call() -> None:
        model.interfaces["ctc"].log_probs(model.encoder.encode(EncoderBatch(features, lengths)).hidden)

    return call, batch * FRAMES_10S * FRAME_SECONDS, flops(model.config, batch * frames, frames)


def streaming(model, streams: int) -> tuple[Callable[[], object], float, float]:
    """A step in the steady state, streams of different age: the call, its audio seconds and its operations."""
    encoder = model.encoder
    geometry = encoder.chunk_geometry(CHUNK)
    slots = [spec for spec in encoder.state_specs if isinstance(spec, Slot)]
    dtype = encoder.encoder_embed.out.bias.dtype
    store = StreamStateStore(None, slots, max_streams=streams, dtype=dtype, device=torch.device("cpu"))
    names = [str(index) for index in range(streams)]
    for name in names:
        store.allocate(name)
    features = torch.randn(streams, geometry.window, 80) - 8
    counts = np.full(streams, CHUNK)
    offsets = 160 + CHUNK * np.arange(streams)

    def step() -> None:
        batch = ChunkBatch(
            features=features,
            valid=torch.full((streams,), geometry.window),
            offsets=torch.from_numpy(offsets),
            out_lengths=torch.from_numpy(counts),
            state=store.cohort(names, offsets, counts, CHUNK),
        )
        model.interfaces["ctc"].log_probs(encoder.encode_chunk(batch).hidden)

    frames = CHUNK * model.config.encoder.output_downsampling
    keys = model.config.encoder.left_context_frames + frames
    return step, streams * geometry.stride * FRAME_SECONDS, flops(model.config, streams * frames, keys)


def main() -> None:
    """Print one line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--offline", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--streams", nargs="*", type=int, default=[1, 8, 32, 64])
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
        work = [(f"offline, {n} x 10 s", offline, n) for n in options.offline]
        work += [(f"{n} streams x 16 frames", streaming, n) for n in options.streams]
        for label, make, count in work:
            with torch.inference_mode():
                call, audio, operations = make(model, count)
                seconds, limit = timer.run(call)
            speed = operations / seconds
            print(
                f"{name:9} {label:34} {seconds * 1e3:8.1f} {audio / seconds:7.1f} {speed / 1e9:8.0f} "
                f"{limit / 1e9:7.0f} {speed / limit:6.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
