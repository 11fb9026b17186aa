"""Every error that OASR raises on purpose.

A message says what happened, where, what was given, what is allowed and what to do next. Errors that the
manual names by a built-in type keep that type as a second base, so that ``except KeyError`` goes on working.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class OasrError(Exception):
    """Base of every error that OASR raises on purpose."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else self.__class__.__name__


class ConfigError(OasrError, ValueError):
    """A setting is unknown, out of range, contradicts another, or is not served yet."""


class InvalidAudioError(OasrError, ValueError):
    """A waveform, an audio file or a sampling rate that cannot be transcribed."""


class AudioTooLongError(InvalidAudioError):
    """Audio longer than the model or its frontend can take in one piece."""


class MissingExtraError(OasrError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class RequestRefusedError(OasrError, ValueError):
    """A request asks for something that this engine, model or decode strategy cannot do."""


class UnknownRequestError(OasrError, KeyError):
    """No request with this id is waiting or running."""


class StreamClosedError(UnknownRequestError):
    """Audio was fed to a stream after its last piece."""


class CachePoolExhausted(OasrError, RuntimeError):  # noqa: N818 - the name of the condition
    """No free block is left in the paged KV pool."""


class CacheGeometryError(ConfigError):
    """Chunk size, block size, left context and pool size do not fit together."""


class CheckpointError(OasrError, ValueError):
    """A checkpoint is missing, foreign, truncated, unsafe or inconsistent."""


class PluginError(OasrError):
    """Base of the errors of the plugin registries."""


class UnknownPluginError(PluginError, KeyError):
    """No plugin of this name on this axis; the message lists the names that exist."""


class PluginLoadError(PluginError, ImportError):
    """A plugin exists but importing it failed; the cause is chained."""


class PluginContractError(PluginError, TypeError):
    """A plugin's object does not fulfil the contract of its axis."""


class PluginConflictError(PluginError):
    """Two distributions claim one name, or a name is registered twice for different objects."""


class PluginVersionError(PluginError):
    """A plugin was written for another version of an axis than the core has."""


class PluginSelectionError(PluginError, ValueError):
    """A name in the allow list, the block list or the preferences matches nothing (strict mode)."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest known name, or an empty string.

    Where no whole name is near, the first part of one may be: ``beem`` is near ``beam_size``.
    """
    names = list(known)
    match = get_close_matches(name, names, n=1, cutoff=0.6)
    if not match:
        stems = {each.partition("_")[0]: each for each in reversed(names) if "_" in each}
        match = [stems[stem] for stem in get_close_matches(name, list(stems), n=1, cutoff=0.7)]
    return f" Did you mean {match[0]!r}?" if match else ""


class TranscriptionError(OasrError, RuntimeError):
    """A request of a ``transcribe`` call failed inside the engine; the message names the stage and the cause."""
