"""OASR: a speech recognition engine whose models, decoders, tokenizers and policies are plugins.

Everything below is imported when it is first used, so that ``import oasr_core`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oasr_core.config import EngineConfig
    from oasr_core.engine import ASREngine
    from oasr_core.errors import OasrError
    from oasr_core.frontend.options import FeatureConfig
    from oasr_core.registry import (
        configure_plugins,
        register_batching_policy,
        register_converter,
        register_decode_strategy,
        register_frontend,
        register_model,
        register_partition_policy,
        register_pretrained,
        register_streaming_backend,
        register_tokenizer,
    )
    from oasr_core.request import DecodingOptions, RequestOutput, Segment, WordTiming

    __version__: str

__all__ = [
    "ASREngine",
    "DecodingOptions",
    "EngineConfig",
    "FeatureConfig",
    "OasrError",
    "RequestOutput",
    "Segment",
    "WordTiming",
    "__version__",
    "configure_plugins",
    "register_batching_policy",
    "register_converter",
    "register_decode_strategy",
    "register_frontend",
    "register_model",
    "register_partition_policy",
    "register_pretrained",
    "register_streaming_backend",
    "register_tokenizer",
]

_HOMES = {
    "ASREngine": "engine",
    "EngineConfig": "config",
    "FeatureConfig": "frontend.options",
    "OasrError": "errors",
    "DecodingOptions": "request",
    "RequestOutput": "request",
    "Segment": "request",
    "WordTiming": "request",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        from importlib_metadata import version

        value: Any = version("oasr-core")
    else:
        value = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'registry')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
