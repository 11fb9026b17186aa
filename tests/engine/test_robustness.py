"""What must not break the engine: plugins that misbehave, callers that race, ends that come early, ids that return."""

from __future__ import annotations

import gc
import logging
import threading
import time

import numpy as np
import pytest

from oasr_core import gc_freeze
from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import RequestRefusedError, TranscriptionError
from oasr_core.hooks import hookimpl
from oasr_core.testing.markers import marker_audio, spell

TOKENS = [1 + i % 15 for i in range(24)]
AUDIO = marker_audio(TOKENS)
TEXT = spell(TOKENS)


def in_thread(function, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(function(*args)))
    thread.start()
    return thread, results


def assert_idle(engine):
    store = engine._parts.runner.backend.store
    assert (store.num_streams, store.free_blocks) == (0, store.attention.config.num_blocks)
    assert not engine.has_work
    assert engine._parts.streaming._live == {}


def test_an_id_reused_while_its_first_owner_is_being_prepared(make_engine, monkeypatch):
    engine = make_engine(overlap_admit=True)
    gate = threading.Event()
    original = engine._samples
    monkeypatch.setattr(engine, "_samples", lambda audio, rate: (gate.wait(10), original(audio, rate))[1])
    engine.add_request(marker_audio([1]), streaming=False, request_id="x")
    engine.abort_request("x")
    engine.add_request(marker_audio([7, 8, 9]), streaming=False, request_id="x")
    gate.set()
    outputs = [output for output in engine.run() if output.finish_reason == "stop"]
    assert [output.text for output in outputs] == [spell([7, 8, 9])]


@pytest.mark.parametrize("stage", ["select", "split"])
def test_policies_that_raise_do_not_end_the_engine(engine, monkeypatch, stage):
    owner = engine._parts.scheduler._batching if stage == "select" else engine._parts.scheduler._partition
    with monkeypatch.context() as patch:
        patch.setattr(owner, stage, lambda *args: 1 / 0)
        streaming = engine.add_request(AUDIO, streaming=True)
        offline = engine.add_request(AUDIO, streaming=False)
        outputs = {output.request_id: output for output in engine.run()}
    assert outputs[streaming].text == TEXT
    assert outputs[offline].finish_reason == ("stop" if stage == "select" else "error")
    assert_idle(engine)


def test_transcribe_waits_quietly_while_others_hold_every_place(make_engine):
    engine = make_engine(max_batch_size=1)
    idle = engine.add_streaming_request()
    engine.step()
    steps = []

    class Counter:
        @hookimpl
        def oasr_step_done(self, outputs, seconds):
            steps.append(seconds)

    engine.observers.register(Counter())
    thread, results = in_thread(engine.transcribe, AUDIO, True)
    time.sleep(0.5)
    assert len(steps) < 50
    engine.feed_chunk(idle, AUDIO, is_last=True)
    thread.join(10)
    assert results == [TEXT]
    assert [output.text for output in engine.run()] == [TEXT]


def test_a_waiting_call_is_woken_by_what_it_waits_for(make_engine):
    engine = make_engine(preferred_batch_size=[2], max_wait_time=20)
    begun = time.monotonic()
    first, results = in_thread(engine.transcribe, AUDIO, False)
    time.sleep(0.1)
    assert engine.transcribe(AUDIO, streaming=False) == TEXT
    first.join(10)
    assert results == [TEXT]
    assert time.monotonic() - begun < 10


def test_run_goes_on_when_a_stream_is_fed_while_it_waits(make_engine):
    engine = make_engine(preferred_batch_size=[2], max_wait_time=3)
    engine.add_request(AUDIO, streaming=False)  # held for company
    stream = engine.add_streaming_request()
    engine.add_streaming_request(request_id="other")
    begun = time.monotonic()
    thread, results = in_thread(engine.run)
    time.sleep(0.2)
    engine.feed_chunk(stream, AUDIO, is_last=True)
    engine.feed_chunk("other", None, is_last=True)
    engine.add_request(AUDIO, streaming=False)
    thread.join(10)
    assert len(results[0]) == 4
    assert time.monotonic() - begun < 2.5


def test_close_wakes_and_ends_a_waiting_call(make_engine):
    engine = make_engine(preferred_batch_size=[2], max_wait_time=30)
    thread, results = in_thread(engine.transcribe_outputs, AUDIO, False)
    time.sleep(0.2)
    engine.close()
    thread.join(5)
    assert not thread.is_alive()
    assert [output.finish_reason for output in results[0]] == ["abort"]


def test_a_cut_transcript_does_not_look_like_a_whole_one(make_engine):
    engine = make_engine(max_num_blocks=8)  # eight frames a stream
    with pytest.raises(TranscriptionError, match=r"recording 0 ended early .*'length'.*'abcdefgh'"):
        engine.transcribe(AUDIO, streaming=True)
    (output,) = engine.transcribe_outputs(AUDIO, streaming=True)
    assert (output.finish_reason, output.text) == ("length", TEXT[:8])


@pytest.mark.parametrize("part", ["open_stream", "text"])
def test_streams_that_cannot_be_opened_leave_their_places(engine, monkeypatch, part):
    with monkeypatch.context() as patch:
        target = engine._inputs if part == "open_stream" else engine._parts.outputs
        patch.setattr(target, "open_stream" if part == "open_stream" else "open", lambda: 1 / 0)
        for _ in range(engine.config.max_batch_size + 2):
            (output,) = engine.transcribe_outputs(AUDIO, streaming=True)
            assert output.finish_reason == "error"
    assert engine.transcribe(AUDIO, streaming=True) == TEXT
    assert_idle(engine)


def test_a_session_that_cannot_be_closed_loses_nothing(engine, monkeypatch, caplog):
    monkeypatch.setattr(engine._parts.strategy, "close", lambda session: 1 / 0)
    with caplog.at_level(logging.ERROR):
        assert engine.transcribe([AUDIO] * 3, streaming=True) == [TEXT] * 3
    assert "closing the decoding session" in caplog.text
    assert_idle(engine)


def test_a_strategy_that_forgets_a_stream_fails_the_cohort(engine, monkeypatch):
    original = engine._parts.strategy.decode_chunk
    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.strategy, "decode_chunk", lambda *args: original(*args)[1:])
        outputs = engine.transcribe_outputs([AUDIO] * 2, streaming=True)
    assert {output.error_stage for output in outputs} == {"streaming_forward"}
    assert "gave 1 results for 2 streams" in outputs[0].error
    assert_idle(engine)


@pytest.mark.parametrize("streaming", [True, False])
def test_an_interrupt_ends_what_was_in_flight(engine, monkeypatch, streaming):
    """Ctrl-C in the middle of a step: those requests fail, none goes on with a hole in it."""
    request_id = engine.add_request(AUDIO, streaming=streaming)
    if streaming:
        engine.step()
    name = "decode_chunk" if streaming else "decode_offline"

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._parts.strategy, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    outputs = [output for output in engine.run() if output.finished]
    assert [(output.request_id, output.finish_reason) for output in outputs] == [(request_id, "error")]
    assert engine.transcribe(AUDIO, streaming=streaming) == TEXT
    assert_idle(engine)


def test_an_observer_may_call_the_engine(engine):
    """It aborts every other request when one has finished, also those that finished in the same step."""

    class Aborter:
        @hookimpl
        def oasr_request_finished(self, output):
            for request_id in ids:
                if engine._loop.lookup(request_id) is not None:
                    engine.abort_request(request_id)

    engine.observers.register(Aborter())
    ids = [engine.add_request(AUDIO, streaming=False) for _ in range(3)]
    ids.append(engine.add_request(AUDIO, streaming=True))
    outputs = engine.run()
    assert sorted(output.request_id for output in outputs) == sorted(ids)
    assert [output.finish_reason for output in outputs].count("stop") == 3
    assert_idle(engine)


def test_an_abort_keeps_what_partials_have_shown(make_engine):
    engine = make_engine(decode_options={"search": "greedy"})
    request_id = engine.add_streaming_request()
    engine.feed_chunk(request_id, AUDIO)
    partial = engine.step()[-1]
    assert partial.stable_prefix_chars > 0
    engine.abort_request(request_id)
    (end,) = engine.run()
    assert end.finish_reason == "abort"
    assert end.text.startswith(partial.text[: partial.stable_prefix_chars])
    assert end.stable_prefix_chars >= partial.stable_prefix_chars


def test_a_feeder_waits_for_one_step_at_most(engine):
    stream = engine.add_streaming_request()
    for _ in range(400):
        engine.add_request(AUDIO, streaming=False)
    steps = []

    class Counter:
        @hookimpl
        def oasr_step_done(self, outputs, seconds):
            steps.append(seconds)

    engine.observers.register(Counter())
    thread, _ = in_thread(engine.run)
    waited = []
    for _ in range(20):
        before = len(steps)
        engine.feed_chunk(stream, AUDIO[:100])
        waited.append(len(steps) - before)
    thread.join(30)
    assert max(waited) <= 3  # one that runs, one that had already passed the turnstile, and one counted at the border
    engine.abort_request(stream)


def test_reading_a_file_does_not_hold_the_lock(engine, monkeypatch):
    original = engine._samples

    def slow(audio, rate):
        time.sleep(0.5)
        return original(audio, rate)

    monkeypatch.setattr(engine, "_samples", slow)
    thread, results = in_thread(engine.transcribe, AUDIO, False)
    time.sleep(0.1)
    begun = time.monotonic()
    assert engine.num_running == 0
    assert time.monotonic() - begun < 0.3
    thread.join(10)
    assert results == [TEXT]


def test_a_prepared_buffer_may_be_refilled(make_engine, monkeypatch):
    engine = make_engine(overlap_admit=True)
    gate = threading.Event()
    original = engine._samples
    monkeypatch.setattr(engine, "_samples", lambda audio, rate: (gate.wait(10), original(audio, rate))[1])
    buffer = AUDIO.numpy().copy()
    engine.add_request(buffer, streaming=False)
    buffer[:] = 0
    gate.set()
    assert [output.text for output in engine.run()] == [TEXT]


def test_an_engine_that_nobody_closed_leaves_nothing(marker_dir):
    threads, holders = threading.active_count(), gc_freeze.holders()
    for _ in range(3):
        engine = ASREngine(EngineConfig(ckpt_dir=marker_dir, device="cpu", overlap_admit=True, gc_freeze=True))
        engine.transcribe(AUDIO, streaming=False)
        del engine
        gc.collect()
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads
    assert gc_freeze.holders() <= holders


@pytest.mark.parametrize(
    ("values", "message"), [({"priority": "high"}, "not an integer"), ({"request_id": 7}, "string")]
)
def test_wrong_types_are_refused_and_leave_no_trace(engine, values, message):
    with pytest.raises(RequestRefusedError, match=message):
        engine.add_request(AUDIO, **values)
    assert not engine.has_work


def test_a_list_of_numpy_numbers_is_one_recording(engine):
    assert engine.transcribe(list(AUDIO.numpy()), streaming=False) == TEXT
    assert engine.transcribe([np.asarray(AUDIO)], streaming=False) == [TEXT]


def test_a_memory_error_in_cublas_words_is_memory(engine, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)")

    monkeypatch.setattr(engine._parts.runner, "forward_offline", broken)
    outputs = engine.transcribe_outputs([AUDIO] * 2, streaming=False)
    assert {output.error_stage for output in outputs} == {"offline_oom"}
