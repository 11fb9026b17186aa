"""A tick ends one decoder step behind its time at most and prefills once; nobody starves. Time is turned by hand."""

from __future__ import annotations

import random

import pytest

from oasr_core.decoding.budget import StepBudget
from oasr_core.executors import incremental
from oasr_core.executors.incremental import MAX_SKIPS
from oasr_core.testing.autoregressive import word_audio, words
from oasr_core.testing.clock import FakeClock

LONG = [1 + i % 50 for i in range(60)]


class Watch:
    """Counts decoder steps and prefills of an engine, and lets each take its time on a clock of its own."""

    def __init__(self, engine, monkeypatch, *, step=0.0, prefill=0.0):
        self.clock = FakeClock()
        self.steps = self.prefills = 0
        self.advances: list[float] = []
        strategy = engine._parts.strategy
        decode, begin, advance = strategy.head.step, strategy.begin_offline, strategy.advance
        prefilling = []

        def slow_step(*args):
            if not prefilling:
                self.steps += 1
                self.clock.advance(step)
            return decode(*args)

        def slow_begin(*args):
            self.prefills += 1
            self.clock.advance(prefill)
            prefilling.append(True)
            begin(*args)
            prefilling.clear()

        def timed(budget):
            begun = self.clock.now
            progress = advance(budget)
            self.advances.append(self.clock.now - begun)
            return progress

        monkeypatch.setattr(strategy.head, "step", slow_step)
        monkeypatch.setattr(strategy, "begin_offline", slow_begin)
        monkeypatch.setattr(strategy, "advance", timed)
        monkeypatch.setattr(
            incremental, "StepBudget", lambda steps, seconds: StepBudget(steps, seconds, clock=self.clock)
        )

    def tick(self, engine):
        """Outputs, decoder steps and prefills of one tick."""
        steps, prefills = self.steps, self.prefills
        outputs = engine.step()
        return outputs, self.steps - steps, self.prefills - prefills


@pytest.mark.parametrize("cost", [0.0004, 0.003, 0.01, 0.025, 0.04, 1.0])
def test_advance_exceeds_its_time_by_one_step_at_most(make_toy, monkeypatch, cost):
    engine = make_toy(max_tick_ms=25, decode_options={"merge_groups": False})
    watch = Watch(engine, monkeypatch, step=cost)
    engine.add_request(word_audio(LONG))
    engine.step()
    engine.add_request(word_audio(LONG[:30]))  # a group beside the first
    texts = {}
    while engine.has_work:
        outputs, steps, _ = watch.tick(engine)
        texts |= {output.request_id: output.text for output in outputs if output.finished}
        assert steps <= 32
        assert steps >= 1 or not engine.has_work or not watch.advances
    assert max(watch.advances) < 0.025 + cost
    assert set(texts.values()) == {words(LONG), words(LONG[:30])}


def test_without_a_time_only_steps_count(make_toy, monkeypatch):
    engine = make_toy(max_tick_ms=0, decode_steps_per_tick=5)
    watch = Watch(engine, monkeypatch, step=60.0)
    engine.add_request(word_audio(LONG))
    counts = []
    while engine.has_work:
        counts.append(watch.tick(engine)[1])
    assert counts == [0, *[5] * 12]  # the first token comes with the prefill, the end is a step


def test_one_micro_batch_is_prefilled_in_a_tick(make_toy, monkeypatch):
    engine = make_toy(
        max_tick_ms=25, max_batch_size=8, max_batch_frames=120, max_wait_time=0, partition_policy="frames"
    )
    watch = Watch(engine, monkeypatch, step=0.001)
    for _ in range(8):
        engine.add_request(word_audio(LONG))
    counts = []
    while engine.has_work:
        counts.append(watch.tick(engine)[2])
    assert max(counts) == 1
    assert sum(counts) == 4  # two of 60 frames each


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_do_not_starve_running_rows_and_running_rows_do_not_starve_arrivals(make_toy, monkeypatch, seed):
    """Every step takes more than a tick; a request arrives in nearly every tick."""
    engine = make_toy(max_tick_ms=25, max_batch_size=80, schedule_policy="fcfs")
    watch = Watch(engine, monkeypatch, step=0.03, prefill=0.5)
    rng = random.Random(seed)
    arrived, began = {}, {}
    for tick in range(80):
        if rng.random() < 0.9 and tick < 60:
            arrived[engine.add_request(word_audio(LONG[: rng.randrange(2, 20)]))] = tick
        pending = engine._parts.strategy.has_pending()
        _, steps, _ = watch.tick(engine)
        assert steps >= 1 or not pending
        began |= {name: tick for name in engine._parts.incremental._live if name not in began}
        waiting = [tick - at for name, at in arrived.items() if name not in began]
        assert max(waiting, default=0) < 2 * (MAX_SKIPS + 1)
    assert set(began) == set(arrived)
    assert watch.steps > watch.prefills * MAX_SKIPS / 2


def test_full_slots_do_not_count_as_skips(make_toy, monkeypatch):
    """Where no slot is free, what waits is prefilled as soon as one is."""
    engine = make_toy(max_tick_ms=25, max_decode_slots=1)
    watch = Watch(engine, monkeypatch, step=0.03)
    engine.add_request(word_audio(LONG[:10]))
    engine.add_request(word_audio(LONG[:5]))
    gap = began = 0
    while engine.has_work:
        outputs, _, prefills = watch.tick(engine)
        began += prefills
        gap = gap + 1 if began == 1 and any(output.finished for output in outputs) else gap
    assert began == 2
    assert gap <= 1
