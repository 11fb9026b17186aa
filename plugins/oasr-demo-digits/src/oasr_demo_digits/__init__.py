"""A small trained model of spoken English digits, with recordings to try it on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from oasr_core.checkpoints.pretrained import PretrainedModel
from oasr_core.errors import InvalidAudioError

__all__ = ["DEMO_DIGITS", "DemoDigits", "audio_names", "audio_path"]

_HERE = Path(__file__).resolve().parent


class DemoDigits(PretrainedModel):
    """The pretrained model ``demo-digits``: a WeNet U2++ Conformer with 1.96 million parameters."""

    oasr_api: ClassVar[str] = "1.0"
    description = "Spoken English digits (zero to nine); small, for demonstrations and tests."
    licence = "CC-BY-SA-4.0"
    languages = ("en",)
    sample_rate = 16000

    @property
    def name(self) -> str:
        """The name that ``--model`` takes."""
        return "demo-digits"

    def path(self) -> Path:
        """The native bundle in the package's data."""
        return _HERE / "bundle"


#: What the entry point ``demo-digits`` refers to.
DEMO_DIGITS = DemoDigits()


def audio_names() -> tuple[str, ...]:
    """Names that :func:`audio_path` takes."""
    return tuple(sorted(path.stem for path in (_HERE / "audio").glob("*.wav")))


def audio_path(name: str = "utt16_7d") -> Path:
    """A recording in the package's data (16 kHz, mono); raises ``InvalidAudioError`` listing the names."""
    path = _HERE / "audio" / f"{name.removesuffix('.wav')}.wav"
    if path.stem not in audio_names():
        raise InvalidAudioError(f"oasr-demo-digits has no recording {name!r}; it has: {', '.join(audio_names())}.")
    return path
