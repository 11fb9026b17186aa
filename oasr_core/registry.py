"""The plugin registries: one :class:`Registry` for each axis, filled by entry points and by registration in process.

``registry("tokenizers").names()`` lists without importing; ``.get(name)`` imports and checks the one that is asked for.
``docs/plugin-api.md`` has the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from oasr_core._plugins import catalogue, loader
from oasr_core._plugins.axes import AXES, Axis
from oasr_core._plugins.catalogue import IN_PROCESS, Entry
from oasr_core._plugins.contract import OasrPluginWarning
from oasr_core._plugins.registry import REGISTRIES, Registry, how_to_install, install_hint
from oasr_core._plugins.settings import configure_plugins
from oasr_core.errors import UnknownPluginError, did_you_mean

__all__ = [
    "API_VERSIONS",
    "AXES",
    "IN_PROCESS",
    "Axis",
    "Entry",
    "OasrPluginWarning",
    "Registry",
    "active_plugins",
    "configure_plugins",
    "how_to_install",
    "install_hint",
    "refresh_plugins",
    "register_batching_policy",
    "register_converter",
    "register_decode_strategy",
    "register_frontend",
    "register_model",
    "register_partition_policy",
    "register_pretrained",
    "register_streaming_backend",
    "register_tokenizer",
    "registry",
]

#: Axis name -> (major, minor) of its contract in this core.
API_VERSIONS: Mapping[str, tuple[int, int]] = {name: axis.api for name, axis in AXES.items()}

C = TypeVar("C", bound=type[Any])


def registry(axis: str) -> Registry[Any]:
    """The registry of an axis (``"models"``, ``"tokenizers"``, ...); raises ``UnknownPluginError`` for another name."""
    try:
        return REGISTRIES[axis]
    except KeyError:
        raise UnknownPluginError(f"No axis {axis!r}. Axes: {', '.join(AXES)}.{did_you_mean(axis, AXES)}") from None


def active_plugins() -> list[str]:
    """One line, ``"axis/name distribution version"``, for each installed plugin in use in this process."""
    return sorted(f"{entry.path} {entry.owner}" for entry in loader.loaded_entries())


def refresh_plugins() -> None:
    """See what was installed meanwhile, and let plugins that failed be tried again."""
    catalogue.forget()
    loader.forget_failures()


def register_model(name: str, cls: type[Any], *, replace: bool = False) -> None:
    """Register a ``BaseAsrModel`` subclass; ``name`` is the bundle's ``architecture``."""
    registry("models").register(name, cls, replace=replace)


def register_converter(name: str, cls: type[Any], *, replace: bool = False) -> None:
    """Register a ``CheckpointConverter`` subclass."""
    registry("converters").register(name, cls, replace=replace)


def register_tokenizer(name: str, cls: type[Any], *, replace: bool = False) -> None:
    """Register a ``Tokenizer`` subclass; ``name`` is ``TokenizerSpec.kind``."""
    registry("tokenizers").register(name, cls, replace=replace)


def register_frontend(name: str, cls: type[Any], *, replace: bool = False) -> None:
    """Register a ``FeatureFrontend`` subclass; ``name`` is ``FeatureSpec.kind``."""
    registry("frontends").register(name, cls, replace=replace)


def register_pretrained(name: str, model: object, *, replace: bool = False) -> None:
    """Register a ``PretrainedModel``; ``name`` is what ``--model`` takes."""
    registry("pretrained").register(name, model, replace=replace)


def register_decode_strategy(name: str, *, replace: bool = False) -> Callable[[C], C]:
    """Class decorator for a ``DecodeStrategy``; ``name`` is ``EngineConfig.decode_method``."""
    return _decorator("decode_strategies", name, replace)


def register_streaming_backend(name: str, *, replace: bool = False) -> Callable[[C], C]:
    """Class decorator for a ``StreamingEncoderBackend``; ``name`` is ``encoder.streaming_kind``."""
    return _decorator("streaming_backends", name, replace)


def register_batching_policy(name: str, *, replace: bool = False) -> Callable[[C], C]:
    """Class decorator for a ``BatchingPolicy``; ``name`` is ``EngineConfig.schedule_policy``."""
    return _decorator("batching_policies", name, replace)


def register_partition_policy(name: str, *, replace: bool = False) -> Callable[[C], C]:
    """Class decorator for a ``PartitionPolicy``; ``name`` is ``EngineConfig.partition_policy``."""
    return _decorator("partition_policies", name, replace)


def _decorator(axis: str, name: str, replace: bool) -> Callable[[C], C]:
    def apply(cls: C) -> C:
        registry(axis).register(name, cls, replace=replace)
        return cls

    return apply
