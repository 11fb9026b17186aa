"""A fault at every stage, offline and streaming: contained as the manual says, nothing half-committed, all returned."""

from __future__ import annotations

import pytest

from oasr_core.errors import CachePoolExhausted
from oasr_core.hooks import hookimpl
from oasr_core.testing.markers import marker_audio, spell

GOOD = [1, 2, 3, 4, 5, 6, 7, 8, 9]
BAD = [15, 14, 13]
BAD_SAMPLES = len(marker_audio(BAD))

#: stage -> (object that owns it, method, does a call carry the bad request?)
OFFLINE = {
    "features": (lambda e: e._inputs, "extract", lambda waves: any(len(w) == BAD_SAMPLES for w in waves)),
    "forward": (lambda e: e._parts.runner, "forward_offline", lambda f, lengths, **_: BAD_SAMPLES // 160 in lengths),
    "decode": (
        lambda e: e._parts.strategy,
        "decode_offline",
        lambda out, options: bool((out.lengths == len(BAD)).any()),
    ),
    "text": (lambda e: e._parts.outputs, "final", lambda rid, *_, **__: rid == "bad"),
}


def inject(monkeypatch, engine, place, error):
    owner, name, hit = place
    target = owner(engine)
    original = getattr(target, name)

    def broken(*args, **kwargs):
        if hit(*args, **kwargs):
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(target, name, broken)


def assert_idle(engine, free_blocks):
    store = engine._parts.runner.backend.store
    assert (store.num_streams, store.free_blocks) == (0, free_blocks)
    assert engine._parts.streaming._live == {}
    assert engine._loop.unfinished() == []
    assert not engine.has_work


@pytest.fixture
def free_blocks(engine):
    return engine._parts.runner.backend.store.free_blocks


@pytest.mark.parametrize("stage", OFFLINE)
def test_offline_only_the_culprit_fails(engine, free_blocks, monkeypatch, stage):
    with monkeypatch.context() as patch:
        inject(patch, engine, OFFLINE[stage], RuntimeError(stage))
        engine.add_request(marker_audio(BAD), streaming=False, request_id="bad")
        ids = [engine.add_request(marker_audio(GOOD), streaming=False) for _ in range(3)]
        outputs = {output.request_id: output for output in engine.run()}
    assert (outputs["bad"].finish_reason, outputs["bad"].error_stage) == ("error", "offline_forward")
    assert stage in outputs["bad"].error
    assert [outputs[i].text for i in ids] == [spell(GOOD)] * 3
    assert_idle(engine, free_blocks)


@pytest.mark.parametrize("stage", ["features", "forward", "decode"])
def test_offline_memory_is_not_retried(engine, free_blocks, monkeypatch, stage):
    calls = []
    owner, name, hit = OFFLINE[stage]
    with monkeypatch.context() as patch:
        inject(patch, engine, (owner, name, lambda *a, **k: calls.append(1) or hit(*a, **k)), MemoryError(stage))
        for name in ("bad", "good"):
            engine.add_request(marker_audio(BAD if name == "bad" else GOOD), streaming=False, request_id=name)
        outputs = {output.request_id: output for output in engine.run()}
    assert {outputs[name].error_stage for name in ("bad", "good")} == {"offline_oom"}
    assert len(calls) == 1
    assert_idle(engine, free_blocks)


STREAMING = {
    "features": (lambda e: e._inputs, "extract_streaming_batch", "streaming_features"),
    "allocator": (lambda e: e._parts.runner.backend.store, "cohort", "streaming_forward"),
    "forward": (lambda e: e._parts.runner, "forward_streaming", "streaming_forward"),
    "decode": (lambda e: e._parts.strategy, "decode_chunk", "streaming_forward"),
}


@pytest.mark.parametrize("stage", STREAMING)
@pytest.mark.parametrize("step", [0, 2])
def test_streaming_the_cohort_fails_and_a_later_stream_is_untouched(engine, free_blocks, monkeypatch, stage, step):
    owner, name, error_stage = STREAMING[stage]
    failing = [engine.add_request(marker_audio(GOOD * 3), streaming=True) for _ in range(2)]
    early = [output for _ in range(step) for output in engine.step()]
    assert not any(output.finished for output in early)
    error = CachePoolExhausted("none left") if stage == "allocator" else RuntimeError(stage)
    with monkeypatch.context() as patch:
        inject(patch, engine, (owner, name, lambda *a, **k: True), error)
        outputs = {output.request_id: output for output in engine.step() if output.finished}
    assert {outputs[i].error_stage for i in failing} == {error_stage}
    assert engine.transcribe(marker_audio(GOOD), streaming=True) == spell(GOOD)
    assert_idle(engine, free_blocks)


@pytest.mark.parametrize("stage", ["open", "session"])
def test_a_stream_that_cannot_be_opened_fails_alone(engine, free_blocks, monkeypatch, stage):
    other = engine.add_request(marker_audio(GOOD), streaming=True)
    engine.step()
    with monkeypatch.context() as patch:
        target = engine._parts.strategy if stage == "session" else engine._parts.runner.backend

        def refuse(*_):
            raise RuntimeError(stage)

        patch.setattr(target, "open", refuse)
        bad = engine.add_request(marker_audio(GOOD), streaming=True)
        outputs = {output.request_id: output for output in engine.run()}
    assert (outputs[bad].finish_reason, outputs[bad].error_stage) == ("error", "streaming_forward")
    assert outputs[other].text == spell(GOOD)
    assert_idle(engine, free_blocks)


def test_an_observers_fault_is_counted_and_changes_nothing(engine, free_blocks):
    class Broken:
        @hookimpl
        def oasr_request_admitted(self, request_id):
            raise RuntimeError("admitted")

        @hookimpl
        def oasr_request_finished(self, output):
            raise RuntimeError("finished")

        @hookimpl
        def oasr_step_done(self, outputs, seconds):
            raise RuntimeError("step")

    engine.observers.register(Broken(), name="broken")
    for streaming in (True, False):
        assert engine.transcribe(marker_audio(GOOD), streaming=streaming) == spell(GOOD)
    assert engine.observers.errors["broken"] >= 6
    assert_idle(engine, free_blocks)


def test_observers_see_every_request(engine):
    class Watcher:
        def __init__(self):
            self.admitted, self.finished, self.steps = [], [], 0

        @hookimpl
        def oasr_request_admitted(self, request_id, streaming):
            self.admitted.append((request_id, streaming))

        @hookimpl
        def oasr_request_finished(self, output):
            self.finished.append((output.request_id, output.finish_reason))

        @hookimpl
        def oasr_step_done(self, outputs, seconds):
            self.steps += 1

    watcher = Watcher()
    engine.observers.register(watcher)
    one = engine.add_request(marker_audio(GOOD), streaming=True)
    two = engine.add_request(marker_audio(GOOD), streaming=False)
    three = engine.add_streaming_request()
    engine.abort_request(three)
    engine.run()
    assert watcher.admitted == [(one, True), (two, False), (three, True)]
    assert sorted(watcher.finished) == sorted([(one, "stop"), (two, "stop"), (three, "abort")])
    assert watcher.steps > 0
