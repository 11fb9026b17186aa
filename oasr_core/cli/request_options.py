"""What ``oasr transcribe`` asks of the decoder for each file."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from oasr_core.cli.formats import OutputFormat
from oasr_core.request import DecodingOptions


def requested(**options: Any) -> DecodingOptions:
    """The options that are given (``None``: not given); raises ``RequestRefusedError`` for a bad value."""
    return DecodingOptions(**{name: value for name, value in options.items() if value is not None})


def with_times(asked: DecodingOptions, output_format: OutputFormat, honours: Collection[str]) -> DecodingOptions:
    """Ask for segments with times wherever the decode family (which ``honours`` these options) writes them.

    Such a family leaves sentences out of long audio when it is not to write times. Subtitles of another one need the
    times of words.
    """
    if "segment_timestamps" in honours:
        return asked.model_copy(update={"segment_timestamps": True})
    return asked.model_copy(update={"word_timestamps": True}) if output_format.is_subtitle else asked
