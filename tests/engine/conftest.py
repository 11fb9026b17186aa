"""Engines over the marker model and over the autoregressive toy: what is written into the audio has to come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.testing import autoregressive, markers


@pytest.fixture(scope="session")
def marker_bundle(tmp_path_factory) -> Path:
    return markers.write_marker_bundle(tmp_path_factory.mktemp("marker") / "bundle")


@pytest.fixture
def marker_dir(marker_bundle) -> Iterator[str]:
    with markers.registered():
        yield str(marker_bundle)


@pytest.fixture(scope="session")
def toy_dirs(tmp_path_factory) -> dict[str, Path]:
    """The toy with features as long as the audio, with a fixed window of 32 frames, and with 32 encoder positions."""
    root = tmp_path_factory.mktemp("toy")
    return {
        "plain": autoregressive.write_toy_bundle(root / "plain"),
        "window": autoregressive.write_toy_bundle(root / "window", window_seconds=1.28),
        "limited": autoregressive.write_toy_bundle(root / "limited", max_positions=32),
    }


@pytest.fixture
def make_engine(marker_dir) -> Iterator[Callable[..., ASREngine]]:
    engines: list[ASREngine] = []

    def make(**settings) -> ASREngine:
        values = {"ckpt_dir": marker_dir, "device": "cpu", "dtype": "float32", "max_batch_size": 4, "gc_freeze": False}
        engines.append(ASREngine(EngineConfig(**{**values, **settings})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def make_toy(toy_dirs) -> Iterator[Callable[..., ASREngine]]:
    """``make_toy(kind="plain", **settings)``: an engine that decodes with ``toy_script`` unless told otherwise."""
    engines: list[ASREngine] = []

    def make(kind: str = "plain", **settings) -> ASREngine:
        values = {"device": "cpu", "dtype": "float32", "max_batch_size": 4, "gc_freeze": False}
        # Tests that look at single ticks would otherwise depend on the speed of the machine.
        values["max_tick_ms"] = 0
        engines.append(ASREngine(EngineConfig(ckpt_dir=toy_dirs[kind], **{**values, **settings})))
        return engines[-1]

    with autoregressive.registered():
        yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def assert_returned() -> Callable[[ASREngine], None]:
    """Nothing of any request is left in an engine with an incremental strategy: no id, no slot, no byte, no page."""

    def check(engine: ASREngine) -> None:
        parts, strategy = engine._parts, engine._parts.strategy
        assert not engine.has_work
        assert (engine.num_running, engine.num_waiting) == (0, 0)
        assert (parts.scheduler.requests(), engine._loop.unfinished(), engine._loop.owned) == ([], [], {})
        assert (parts.incremental.in_flight, parts.incremental.requests()) == (0, [])
        assert not strategy.has_pending()
        assert strategy._budget.used == 0
        if strategy._pool is not None:
            blocks = strategy._pool.blocks
            assert blocks.num_free == blocks.num_blocks

    return check


@pytest.fixture
def engine(make_engine) -> ASREngine:
    return make_engine()
