"""Batch size, order, packing, padding, chunking, neighbours: nothing may change what a request gets (tolerances.md)."""

from __future__ import annotations

import random

import pytest
import torch

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.frontend.input import InputProcessor
from oasr_core.testing.invariance import FP32_TOLERANCE, assert_equal, run_offline, run_streaming

DTYPES = ["float32", "bfloat16"]
_engines: dict[tuple, ASREngine] = {}


@pytest.fixture(scope="module", autouse=True)
def _close_engines():
    yield
    while _engines:
        _engines.popitem()[1].close()


@pytest.fixture
def make(wenet_digits):
    def build(dtype: str, **settings) -> ASREngine:
        key = (dtype, *sorted(settings.items()))
        if key not in _engines:
            _engines[key] = ASREngine(
                EngineConfig(ckpt_dir=wenet_digits, device="cpu", dtype=dtype, gc_freeze=False, **settings)
            )
        return _engines[key]

    return build


@pytest.fixture
def reference(make, clips):
    """Each request alone, whole audio at once, the same dtype."""

    def run(dtype: str, streaming: bool, **settings):
        engine = make(dtype, max_batch_size=1, **settings)
        if not streaming:
            return [run_offline(engine, [clip])[0] for clip in clips]
        return [run_streaming(engine, [clip], lambda *_: 10**9)[0] for clip in clips]

    return run


def check(got, want, dtype, what):
    """fp32: log-probs within tolerance; bf16: texts, tokens and times of these recordings equal."""
    assert_equal(got, want, tolerance=FP32_TOLERANCE if dtype == "float32" else None, what=what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 2, 8, 32])
@pytest.mark.parametrize("packing", [False, True])
def test_offline_batch_and_order(make, clips, reference, dtype, batch, packing):
    engine = make(dtype, max_batch_size=batch, enable_sequence_packing=packing)
    want = reference(dtype, streaming=False)
    shuffled = list(range(len(clips)))
    random.Random(batch).shuffle(shuffled)
    for order in (range(len(clips)), shuffled):
        check(run_offline(engine, clips, order=order), want, dtype, f"batch {batch} packing {packing}")


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule_policy": "fcfs"},
        {"max_batch_frames": 1500},
        {"max_packed_frames": 300, "enable_sequence_packing": True},
    ],
)
def test_offline_policies_and_partitions(make, clips, reference, settings):
    check(run_offline(make("float32", **settings), clips), reference("float32", False), "float32", str(settings))


@pytest.mark.parametrize("poison", [1e4, float("nan")])
@pytest.mark.parametrize("packing", [False, True])
def test_what_lies_beyond_a_row_does_not_matter(make, clips, reference, monkeypatch, poison, packing):
    original = InputProcessor.extract

    def poisoned(self, waveforms):
        features, lengths = original(self, waveforms)
        for row, length in enumerate(lengths):
            features[row, length:] = poison
        return features, lengths

    monkeypatch.setattr(InputProcessor, "extract", poisoned)
    engine = make("float32", max_batch_size=32, enable_sequence_packing=packing)
    check(run_offline(engine, clips), reference("float32", False), "float32", f"poison {poison}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [-1, 4, 0])
@pytest.mark.parametrize("batch", [2, 8, 32])
def test_streaming_neighbours_of_every_age(make, clips, reference, dtype, left, batch):
    want = reference(dtype, streaming=True, num_left_chunks=left)
    engine = make(dtype, max_batch_size=batch, num_left_chunks=left)
    sizes = random.Random(left * 100 + batch)
    got = run_streaming(engine, clips, lambda *_: sizes.choice([800, 4000, 10_240, 30_000]), stagger=2)
    check(got, want, dtype, f"{batch} streams, left {left}")


@pytest.mark.parametrize("milliseconds", [1, 7, 20, 100, 640, 3000])
def test_any_piece_size(make, clips, reference, milliseconds):
    chosen = clips[:2] + clips[-1:] if milliseconds < 20 else clips
    want = [ref for ref, clip in zip(reference("float32", True), clips, strict=True) if any(clip is c for c in chosen)]
    engine = make("float32", max_batch_size=32)
    got = run_streaming(engine, chosen, lambda *_: milliseconds * 16)
    check(got, want, "float32", f"pieces of {milliseconds} ms")


@pytest.mark.parametrize("chunk", [1, 4, 7, 16, 20])
def test_any_chunk_size_in_company(make, clips, reference, chunk):
    want = reference("float32", streaming=True, chunk_size=chunk, num_left_chunks=3)
    engine = make("float32", max_batch_size=8, chunk_size=chunk, num_left_chunks=3)
    check(run_streaming(engine, clips, lambda *_: 9999, stagger=1), want, "float32", f"chunk {chunk}")


@pytest.mark.parametrize(
    "settings", [{"use_paged_cache": False}, {"finalize_silence_pad": False}, {"block_size_frames": 24}]
)
@pytest.mark.parametrize("left", [-1, 2])
def test_cache_discipline_changes_nothing(make, clips, reference, settings, left):
    want = reference("float32", streaming=True, num_left_chunks=left)
    engine = make("float32", max_batch_size=8, num_left_chunks=left, **settings)
    check(run_streaming(engine, clips, lambda *_: 5000, stagger=1), want, "float32", str(settings))


def test_offline_and_streaming_share_one_engine(make, clips, reference):
    engine = make("float32", max_batch_size=8)
    offline, streaming = reference("float32", False), reference("float32", True)
    ids = [engine.add_request(clip, streaming=bool(i % 2)) for i, clip in enumerate(clips)]
    outputs = {output.request_id: output for output in engine.run()}
    for i, request_id in enumerate(ids):
        want = (streaming if i % 2 else offline)[i].output
        assert (outputs[request_id].text, outputs[request_id].tokens) == (want.text, want.tokens)


def test_aborted_neighbours_leave_no_trace(make, clips, reference):
    want = reference("float32", streaming=True)
    engine = make("float32", max_batch_size=8)
    neighbours = []
    for clip in clips[:3]:
        neighbours.append(engine.add_streaming_request())
        engine.feed_chunk(neighbours[-1], clip[: len(clip) // 2])
    engine.step()
    for request_id in neighbours:
        engine.abort_request(request_id)
    assert {output.finish_reason for output in engine.run()} == {"abort"}
    check(run_streaming(engine, clips, lambda *_: 8000), want, "float32", "after aborts")


def test_the_checker_can_fail(make, clips):
    one = run_offline(make("float32", max_batch_size=1), clips[:1])
    other = run_offline(make("float32", max_batch_size=1), [clips[0] * 0.5])
    with pytest.raises(AssertionError, match="log-probs differ"):
        assert_equal(other, one)
    nothing = run_offline(make("float32", max_batch_size=1), [torch.zeros(10)])
    with pytest.raises(AssertionError, match="frames"):
        assert_equal(nothing, one)
