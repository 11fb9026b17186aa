"""Admission on a thread (``overlap_admit``) and admission held back for a preferred size."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from oasr_core.errors import StreamClosedError
from oasr_core.testing.markers import marker_audio, spell

TOKENS = [1, 2, 3, 4, 5]


def test_the_id_comes_before_the_prep_and_the_text_after(make_engine, monkeypatch):
    engine = make_engine(overlap_admit=True)
    gate = threading.Event()
    original = engine._samples

    def slow(audio, rate):
        gate.wait(10)
        return original(audio, rate)

    monkeypatch.setattr(engine, "_samples", slow)
    ids = [engine.add_request(marker_audio(TOKENS), streaming=False) for _ in range(3)]
    assert engine.num_waiting == 3
    assert engine.step() == []
    gate.set()
    assert [(output.request_id, output.text) for output in engine.run()] == [(i, spell(TOKENS)) for i in ids]
    assert not engine.has_work


def test_a_prep_failure_is_an_output(make_engine):
    engine = make_engine(overlap_admit=True)
    bad = engine.add_request(torch.full((1000,), float("nan")), streaming=False)
    missing = engine.add_request("no/such/file.wav", streaming=False)
    good = engine.add_request(marker_audio(TOKENS), streaming=False)
    outputs = {output.request_id: output for output in engine.run()}
    for request_id in (bad, missing):
        assert (outputs[request_id].finish_reason, outputs[request_id].error_stage) == ("error", "offline_prep")
    assert "no/such/file.wav" in outputs[missing].error
    assert outputs[good].text == spell(TOKENS)


def test_abort_withdraws_what_is_still_being_prepared(make_engine, monkeypatch):
    engine = make_engine(overlap_admit=True)
    gate = threading.Event()
    original = engine._samples
    monkeypatch.setattr(engine, "_samples", lambda audio, rate: (gate.wait(10), original(audio, rate))[1])
    request_id = engine.add_request(marker_audio(TOKENS), streaming=False)
    engine.abort_request(request_id)
    assert [output.finish_reason for output in engine.run()] == ["abort"]
    with pytest.raises(StreamClosedError):
        engine.abort_request(request_id)
    gate.set()
    later = engine.add_request(marker_audio(TOKENS), streaming=False)  # behind it on the thread
    assert [output.request_id for output in engine.run()] == [later]


def test_transcribe_waits_for_its_admissions(make_engine):
    engine = make_engine(overlap_admit=True)
    assert engine.transcribe([marker_audio(TOKENS)] * 5, streaming=False) == [spell(TOKENS)] * 5


def test_a_dropped_engine_goes(make_engine, marker_dir):
    from oasr_core.config import EngineConfig
    from oasr_core.engine import ASREngine

    engine = ASREngine(EngineConfig(ckpt_dir=marker_dir, device="cpu", overlap_admit=True, gc_freeze=False))
    assert engine.transcribe(marker_audio(TOKENS), streaming=False) == spell(TOKENS)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert gone() is None


@pytest.mark.parametrize("streaming", [True, False])
def test_held_requests_go_when_they_are_overdue(make_engine, streaming):
    engine = make_engine(preferred_batch_size=[4], max_wait_time=0.05)
    for _ in range(6):
        engine.add_request(marker_audio(TOKENS), streaming=streaming)
    begun = time.monotonic()
    assert [output.text for output in engine.run()] == [spell(TOKENS)] * 6
    assert time.monotonic() - begun < 5
    assert engine.transcribe([marker_audio(TOKENS)], streaming=streaming) == [spell(TOKENS)]
