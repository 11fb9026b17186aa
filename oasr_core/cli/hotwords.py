"""``--hotword PHRASE[=BOOST]`` and ``--hotwords-file FILE``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from oasr_core.errors import ConfigError
from oasr_core.request import Hotword


def collect_hotwords(file: Path | None, flags: Sequence[str]) -> tuple[Hotword, ...]:
    """The phrases of ``--hotwords-file``, then those of ``--hotword``, whose boost counts where both name a phrase.

    Raises ``ConfigError`` for a file that cannot be read and for what is no ``PHRASE[=BOOST]``.
    """
    hotwords = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error})"
            raise ConfigError(f"--hotwords-file {file}: cannot read it: {reason}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.lstrip().startswith("#"):
                hotwords.append(parse_hotword(line, f"--hotwords-file {file}, line {number}"))
    return (*hotwords, *(parse_hotword(flag, "--hotword") for flag in flags))


def parse_hotword(text: str, where: str) -> Hotword:
    """``PHRASE`` or ``PHRASE=BOOST``; the last ``=`` counts. Raises ``ConfigError`` naming ``where``."""
    phrase, equals, number = text.rpartition("=") if "=" in text else (text, "", "")
    try:
        boost = float(number) if equals else None
    except ValueError:
        boost = math.nan
    if not phrase.strip() or (boost is not None and not math.isfinite(boost)):
        raise ConfigError(
            f"{where}: {text.strip()!r} is no PHRASE[=BOOST] with a finite number as boost, for example 'NEW YORK=2'; "
            "for a phrase that holds '=' name its boost too"
        )
    return Hotword(phrase=phrase.strip(), boost=boost)
