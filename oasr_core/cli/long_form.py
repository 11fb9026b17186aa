"""``--long-form``: how recordings beyond a model's window are cut, unless a file or ``--set`` has settled it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from oasr_core.errors import ConfigError

if TYPE_CHECKING:
    from oasr_core.config import EngineConfig


class LongForm(StrEnum):
    """Value of ``--long-form``."""

    auto = "auto"
    off = "off"
    parallel = "parallel"
    sequential = "sequential"


def long_form_flags(wanted: LongForm | None) -> dict[str, Any]:
    """Fields of ``EngineConfig`` that the option sets; none where it is not given."""
    if wanted is None:
        return {}
    if wanted is LongForm.off:
        return {"long_form": False}
    return {"long_form": True, "long_form_mode": wanted.value}


def with_long_form(config: EngineConfig, origins: Mapping[str, str]) -> EngineConfig:
    """Recordings of any length are taken, and the mode is ``auto``, where no source says otherwise.

    A segmenter cuts windows that are decoded in parallel, so ``auto`` is that where one is named. Raises
    ``ConfigError`` for a segmenter, named by a flag, that would have nothing to do.
    """
    defaults = {"long_form": True, "long_form_mode": "auto"}
    config = config.replace(**{name: value for name, value in defaults.items() if origins[name] == "default"})
    if config.segmenter is None:
        return config
    if config.long_form and config.long_form_mode == "auto":
        return config.replace(long_form_mode="parallel")
    cuts = config.long_form and config.long_form_mode == "parallel"
    if origins["segmenter"] == "flag" and not (cuts or _listens(config)):
        how = "--long-form sequential follows the model's timestamps" if config.long_form else "nothing is cut"
        raise ConfigError(
            f"segmenter {config.segmenter!r} would have nothing to do: {how}; drop it, or use --long-form parallel."
        )
    return config


def _listens(config: EngineConfig) -> bool:
    """Whether the segmenter serves as silence gate or finds endpoints."""
    return config.silence_gate == config.segmenter or config.endpoint_silence == "segmenter"
