"""Every test of the registries begins and ends with the environment's settings and an unread catalogue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oasr_core._plugins import settings
from oasr_core.registry import configure_plugins, refresh_plugins
from oasr_core.testing.plugin_env import plugin_env

__all__ = ["plugin_env"]


@pytest.fixture(autouse=True)
def _plain_settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (settings.ENV_ALLOW, settings.ENV_BLOCK, settings.ENV_PREFER, settings.ENV_STRICT):
        monkeypatch.delenv(name, raising=False)
    configure_plugins()
    refresh_plugins()
    yield
    configure_plugins()
