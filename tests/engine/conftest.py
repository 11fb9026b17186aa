"""Engines over the marker model: what is written into the audio has to come out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from oasr_core.config import EngineConfig
from oasr_core.engine import ASREngine
from oasr_core.testing import markers


@pytest.fixture(scope="session")
def marker_dir(tmp_path_factory) -> Iterator[str]:
    with markers.registered():
        yield str(markers.write_marker_bundle(tmp_path_factory.mktemp("marker") / "bundle"))


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
def engine(make_engine) -> ASREngine:
    return make_engine()
