"""Which autoregressive requests are in flight: slots, bytes, the window in which arrivals are gathered; threads."""

from __future__ import annotations

import threading

import pytest
import torch

from oasr_core.errors import RequestRefusedError
from oasr_core.request import DecodingOptions
from oasr_core.testing.autoregressive import word_audio, words

SCRIPT = [5, 0, 9, 17, 3, 0, 3, 44, 21, 8, 30, 2]
TEXT = words(SCRIPT)
AUDIO = word_audio(SCRIPT)
LONG = [1 + i % 50 for i in range(40)]


def drain(engine):
    outputs = []
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
    raise AssertionError(f"{engine.num_running} requests run and {engine.num_waiting} wait without end")


def finals(outputs):
    return {output.request_id: output for output in outputs if output.finished}


@pytest.mark.parametrize("slots", [1, 3])
def test_never_more_in_flight_than_slots(make_toy, assert_returned, slots):
    engine = make_toy(max_decode_slots=slots, max_batch_size=8, decode_steps_per_tick=2)
    for n in range(9):
        engine.add_request(word_audio(LONG[: 3 + 4 * n]))
    outputs, most = [], 0
    while engine.has_work:
        outputs += engine.step()
        most = max(most, engine.num_running, engine._parts.incremental.in_flight)
    assert most == slots
    assert len(finals(outputs)) == 9
    assert_returned(engine)


def ceiling(engine, decoding=None):
    return engine._parts.strategy._ceiling_bytes(decoding or DecodingOptions())


@pytest.mark.parametrize("storage", ["dense", "paged"])
def test_the_byte_budget_bounds_the_rows_in_flight(make_toy, assert_returned, storage):
    size = ceiling(make_toy())
    engine = make_toy(
        decode_kv_budget_gib=2.5 * size / 2**30, decode_steps_per_tick=1, decode_options={"kv_storage": storage}
    )
    ids = [engine.add_request(word_audio(LONG[: 5 + n])) for n in range(6)]
    outputs, most = [], 0
    while engine.has_work:
        outputs += engine.step()
        most = max(most, len(engine._parts.incremental._live))
        assert engine._parts.strategy._budget.used <= 2.5 * size
    assert most == 2
    assert [finals(outputs)[request_id].text for request_id in ids] == [words(LONG[: 5 + n]) for n in range(6)]
    assert_returned(engine)


def test_small_requests_fit_where_large_ones_do_not(make_toy):
    size = ceiling(make_toy())
    engine = make_toy(decode_kv_budget_gib=size / 2**30, decode_steps_per_tick=1)
    small = DecodingOptions(max_new_tokens=8)
    assert ceiling(engine, small) * 2 <= size
    for _ in range(3):
        engine.add_request(AUDIO, decoding=small)
    engine.step()
    assert len(engine._parts.incremental._live) >= 2


def test_what_never_fits_is_refused_at_admission(make_toy, assert_returned):
    engine = make_toy(decode_kv_budget_gib=0.5 * ceiling(make_toy()) / 2**30)
    with pytest.raises(RequestRefusedError, match="decode_kv_budget_gib"):
        engine.add_request(AUDIO)
    assert engine.transcribe_outputs([AUDIO], decoding=DecodingOptions(max_new_tokens=12))[0].text == TEXT
    assert_returned(engine)


def test_memory_that_nothing_will_free_is_an_error_not_a_wait(make_toy, monkeypatch):
    engine = make_toy()
    monkeypatch.setattr(engine._parts.strategy, "reserve", lambda request: False)
    ids = [engine.add_request(AUDIO) for _ in range(2)]
    outputs = finals(drain(engine))
    assert {output.error_stage for output in outputs.values()} == {"prefill_oom"}
    assert all("raise decode_kv_budget_gib" in output.error for output in outputs.values())
    assert set(outputs) == set(ids)


@pytest.mark.parametrize(("budget", "limit"), [(0, None), (0.001, int(0.001 * 2**30))])
def test_the_budget_reaches_the_strategy(make_toy, budget, limit):
    assert make_toy(decode_kv_budget_gib=budget)._parts.strategy._budget.limit == limit


def test_a_derived_budget_admits_one_request_at_least(make_toy, monkeypatch):
    monkeypatch.setattr("oasr_core.model_runner.ModelRunner.available_bytes", lambda *args: 1)
    engine = make_toy()
    assert engine._parts.strategy._budget.limit >= ceiling(engine)
    assert engine.transcribe([AUDIO, AUDIO]) == [TEXT, TEXT]


def test_the_admit_window_lets_arrivals_share_a_prefill(make_toy, monkeypatch):
    for window, expected in ((0, [1, 1]), (60_000, [2])):
        engine = make_toy(decode_admit_window_ms=window, max_wait_time=60, max_batch_size=2)
        batches = []
        original = engine._parts.runner.forward_offline
        monkeypatch.setattr(
            engine._parts.runner,
            "forward_offline",
            lambda f, n, original=original, batches=batches, **k: batches.append(len(n)) or original(f, n, **k),
        )
        engine.add_request(AUDIO)
        engine.step()
        engine.add_request(AUDIO)
        assert len(finals(engine.run())) == 2
        assert batches == expected


def test_an_isolated_request_waits_for_one_window(make_toy):
    engine = make_toy(decode_admit_window_ms=50)
    assert engine.transcribe(AUDIO) == TEXT
    engine.add_request(AUDIO)
    assert [output.text for output in engine.run()] == [TEXT]


def test_overlap_admit(make_toy, assert_returned):
    engine = make_toy(overlap_admit=True)
    bad = engine.add_request(torch.full((1000,), float("nan")))
    good = [engine.add_request(AUDIO) for _ in range(5)]
    outputs = finals(engine.run())
    assert (outputs[bad].finish_reason, outputs[bad].error_stage) == ("error", "offline_prep")
    assert [outputs[request_id].text for request_id in good] == [TEXT] * 5
    assert engine.transcribe([AUDIO, AUDIO]) == [TEXT, TEXT]
    assert_returned(engine)


def test_outputs_of_transcribe_reach_no_one_else(make_toy):
    engine = make_toy(decode_steps_per_tick=1)
    mine = engine.add_request(word_audio(LONG))
    assert engine.transcribe([AUDIO, AUDIO]) == [TEXT, TEXT]
    assert {output.request_id for output in drain(engine)} == {mine}


def test_threads(make_toy, assert_returned):
    engine = make_toy(decode_steps_per_tick=2, max_decode_slots=3, decode_options={"kv_storage": "paged"})
    results, collected = {}, []
    stop = threading.Event()

    def transcribe(n):
        results[n] = engine.transcribe([word_audio(LONG[:n]), AUDIO])

    def abort():
        for _ in range(15):
            request_id = engine.add_request(word_audio(LONG))
            engine.abort_request(request_id)

    def step():
        while not stop.is_set():
            collected.extend(engine.step())

    workers = [threading.Thread(target=transcribe, args=(n,)) for n in range(1, 7)]
    workers.append(threading.Thread(target=abort))
    stepper = threading.Thread(target=step)
    for thread in (*workers, stepper):
        thread.start()
    for thread in workers:
        thread.join(20)
    stop.set()
    stepper.join(20)
    assert results == {n: [words(LONG[:n]), TEXT] for n in range(1, 7)}
    collected += drain(engine)
    assert sum(output.finished for output in collected) == 15
    assert_returned(engine)
