"""Random lives of many streams: whatever happens, every block, row, session and queue entry returns."""

from __future__ import annotations

import gc
import resource

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.errors import UnknownRequestError
from oasr_core.testing.markers import marker_audio, spell

TOKENS = st.lists(st.integers(0, 15), min_size=1, max_size=20)


class Lives(RuleBasedStateMachine):
    """Opens, feeds, ends, aborts and breaks streams and offline requests in any order."""

    engine: ASREngine

    def __init__(self) -> None:
        super().__init__()
        self.store = self.engine._parts.runner.backend.store
        self.blocks = self.store.free_blocks
        self.expected: dict[str, str | None] = {}
        self.open: dict[str, torch.Tensor] = {}
        self.ended: list[str] = []

    def collect(self, outputs) -> None:
        for output in outputs:
            if output.finished:
                assert output.request_id not in self.ended
                self.ended.append(output.request_id)
                self.open.pop(output.request_id, None)
                if output.finish_reason == "stop":
                    assert output.text == self.expected[output.request_id]

    @rule(tokens=TOKENS, streaming=st.booleans(), priority=st.integers(-1, 1))
    def whole(self, tokens, streaming, priority):
        name = f"{len(self.expected):04d}"
        audio = marker_audio(tokens)
        request_id = self.engine.add_request(audio, streaming=streaming, priority=priority, request_id=name)
        self.expected[request_id] = spell(tokens)

    @rule(tokens=TOKENS)
    def open_stream(self, tokens):
        request_id = self.engine.add_streaming_request(request_id=f"{len(self.expected):04d}")
        self.expected[request_id] = spell(tokens)
        self.open[request_id] = marker_audio(tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), size=st.integers(1, 6000))
    def feed(self, data, size):
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        rest = self.open[request_id]
        self.engine.feed_chunk(request_id, rest[:size], is_last=size >= len(rest))
        self.open[request_id] = rest[size:]
        if size >= len(rest):
            del self.open[request_id]

    @precondition(lambda self: len(self.expected) > len(self.ended))
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(set(self.expected) - set(self.ended))))
        try:
            self.engine.abort_request(request_id)
        except UnknownRequestError:
            raise AssertionError("a request without a terminal output is unknown") from None
        self.open.pop(request_id, None)
        self.collect(self.engine.step())

    @rule()
    def fault(self):
        runner = self.engine._parts.runner

        def broken(chunks):
            raise RuntimeError("injected")

        runner.forward_streaming = broken  # hides the method on this object only
        try:
            self.collect(self.engine.step())
        finally:
            del runner.forward_streaming

    @rule()
    def step(self):
        self.collect(self.engine.step())

    @invariant()
    def places_are_consistent(self):
        assert self.store.num_streams == len(self.engine._parts.streaming._live) <= self.engine.config.max_batch_size

    def teardown(self) -> None:
        for request_id in list(self.open):
            self.engine.abort_request(request_id)
        self.collect(self.engine.run())
        assert sorted(self.ended) == sorted(self.expected)
        assert (self.store.num_streams, self.store.free_blocks) == (0, self.blocks)
        assert self.engine._parts.streaming._live == {}
        assert self.engine._loop.unfinished() == []
        assert not self.engine.has_work


def test_random_lives(make_engine):
    engine = make_engine(max_batch_size=3, max_num_blocks=30, max_wait_time=1e9)  # no clock in what happens
    machine = type("BoundLives", (Lives,), {"engine": engine})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _rss_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024


@pytest.mark.slow
def test_memory_is_flat_over_twenty_thousand_streams(marker_dir):
    config = EngineConfig(ckpt_dir=marker_dir, device="cpu", dtype="float32", max_batch_size=32, gc_freeze=False)
    with ASREngine(config) as engine:
        audio = marker_audio([1, 2, 3, 4, 5, 6])
        store = engine._parts.runner.backend.store
        blocks = store.free_blocks

        def thousand() -> None:
            for turn in range(1000):
                request_id = engine.add_streaming_request()
                engine.feed_chunk(request_id, audio, is_last=turn % 10 != 0)
                if turn % 10 == 0:
                    engine.abort_request(request_id)
                if turn % 64 == 0:
                    engine.step()
            outputs = engine.run()
            assert all(output.finish_reason in ("stop", "abort") for output in outputs)

        for _ in range(3):
            thousand()
        gc.collect()
        objects, memory = len(gc.get_objects()), _rss_kib()
        for _ in range(17):
            thousand()
        gc.collect()
        assert (store.num_streams, store.free_blocks) == (0, blocks)
        assert len(gc.get_objects()) - objects < 2_000
        assert _rss_kib() - memory < 8 * 1024
