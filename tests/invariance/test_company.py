"""Whatever policy, partition, priority, search and company: n-best, scores, words and times stay a request's own."""

from __future__ import annotations

import random
from itertools import count

import pytest

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.request import DecodingOptions

OPTIONS = DecodingOptions(n_best=3, word_timestamps=True)
HOTWORD = DecodingOptions(hotwords=["NINE NINE"], word_timestamps=True)
_names = count()


@pytest.fixture(scope="module")
def make(wenet_digits):
    engines: dict[tuple, ASREngine] = {}

    def build(**settings) -> ASREngine:
        key = tuple(sorted(settings.items()))
        if key not in engines:
            values = {"ckpt_dir": wenet_digits, "device": "cpu", "dtype": "float32", "gc_freeze": False, **settings}
            engines[key] = ASREngine(EngineConfig(**values))
        return engines[key]

    yield build
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="module")
def alone(make, clips):
    """Every clip as the only request of its engine."""
    results = {}

    def run(streaming: bool, method: str = "ctc"):
        if (streaming, method) not in results:
            engine = make(max_batch_size=1, decode_method=method)
            results[streaming, method] = [
                engine.transcribe_outputs([clip], streaming=streaming, decoding=OPTIONS)[0] for clip in clips
            ]
        return results[streaming, method]

    return run


def assert_same(got, want):
    for name in ("text", "tokens", "nbest_texts", "timestamps", "finish_reason"):
        assert getattr(got, name) == getattr(want, name), name
    assert got.scores == pytest.approx(want.scores, abs=2e-3)
    assert [(w.word, w.start, w.end) for w in got.words] == [(w.word, w.start, w.end) for w in want.words]
    assert [w.confidence for w in got.words] == pytest.approx([w.confidence for w in want.words], abs=1e-3)


SETTINGS = [
    {"schedule_policy": "fcfs"},
    {"schedule_policy": "window", "max_offline_pad_ratio": 1.3},
    {"schedule_policy": "bucket", "length_bucket_ratio": 0.5},
    {"schedule_policy": "sjf", "max_batch_frames": 2000},
    {"partition_policy": "packing", "max_packed_frames": 400},
    {"partition_policy": "frames", "max_batch_frames": 900},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("streaming", [False, True])
def test_policies_with_mixed_priorities_and_company(make, clips, alone, settings, streaming):
    """Our requests among others with hotwords, aborted ones and a mix of priorities, in random order."""
    engine = make(max_batch_size=4, **settings)
    generator = random.Random(str(settings))
    mine: dict[str, int] = {}
    strangers: list[str] = []
    jobs = [("mine", i) for i in range(len(clips))] + [("hot", i) for i in range(4)] + [("abort", i) for i in range(3)]
    generator.shuffle(jobs)
    for kind, i in jobs:
        name = f"company-{next(_names)}"
        decoding = OPTIONS if kind == "mine" else HOTWORD
        priority = generator.randrange(-1, 2)
        engine.add_request(clips[i], streaming=streaming, priority=priority, decoding=decoding, request_id=name)
        if kind == "mine":
            mine[name] = i
        elif kind == "abort":
            strangers.append(name)
    outputs = {o.request_id: o for o in engine.step() if o.finished}
    for name in strangers:
        if name not in outputs:
            engine.abort_request(name)
    outputs |= {output.request_id: output for output in engine.run()}
    for name, i in mine.items():
        assert_same(outputs[name], alone(streaming)[i])


@pytest.mark.parametrize("streaming", [False, True])
def test_preferred_sizes(make, clips, alone, streaming):
    engine = make(max_batch_size=8, preferred_batch_size=(2, 4), max_wait_time=0.02)
    outputs = engine.transcribe_outputs(clips, streaming=streaming, decoding=OPTIONS)
    for output, want in zip(outputs, alone(streaming), strict=True):
        assert_same(output, want)


@pytest.mark.parametrize("batch", [2, 8, 32])
def test_rescoring_in_batches(make, clips, alone, batch):
    engine = make(max_batch_size=batch, decode_method="ctc_aed_rescoring", service_mode="offline")
    outputs = engine.transcribe_outputs(clips, streaming=False, decoding=OPTIONS)
    for output, want in zip(outputs, alone(False, "ctc_aed_rescoring"), strict=True):
        assert_same(output, want)


def test_a_failing_neighbour_leaves_the_others_alone(make, clips, alone, monkeypatch):
    engine = make(max_batch_size=8)
    original = engine._parts.runner.forward_offline
    bad_frames = engine._inputs.num_frames(len(clips[2]))

    def broken(features, lengths, **kwargs):
        if bad_frames in lengths:
            raise RuntimeError("injected")
        return original(features, lengths, **kwargs)

    monkeypatch.setattr(engine._parts.runner, "forward_offline", broken)
    outputs = engine.transcribe_outputs(clips, streaming=False, decoding=OPTIONS)
    for i, (output, want) in enumerate(zip(outputs, alone(False), strict=True)):
        if i == 2:
            assert output.error_stage == "offline_forward"
        else:
            assert_same(output, want)


def test_hotwords_change_only_their_own_request(make, clips, alone):
    engine = make(max_batch_size=8)
    hot = DecodingOptions(n_best=3, word_timestamps=True, hotwords=[{"phrase": "SEVEN", "boost": 9.0}])
    ids = [engine.add_request(clip, streaming=True, decoding=hot if i % 2 else OPTIONS) for i, clip in enumerate(clips)]
    outputs = {output.request_id: output for output in engine.run()}
    for i, request_id in enumerate(ids):
        if i % 2 == 0:
            assert_same(outputs[request_id], alone(True)[i])
    changed = [outputs[request_id].text != alone(True)[i].text for i, request_id in enumerate(ids) if i % 2]
    assert any(changed)
