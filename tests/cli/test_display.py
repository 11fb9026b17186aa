"""What a terminal shows while files are transcribed."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from oasr_core.cli.display import Display
from oasr_core.cli.logs import log_lines


def test_a_terminal_shows_bar_and_partials_and_is_left_clean():
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=40, height=5, color_system=None)
    text = "the end of a long partial transcript stays in sight: two seven"
    with Display(2, console) as display:
        display.partial(0, "some/folder/a-name-that-is-rather-long.wav", text, 1.0)
        display.partial(1, "[b].wav", "你好世界" * 20, 1.0)
        with display.hidden():
            terminal.write("RESULT\n")
        display.done(0)
    drawn = terminal.getvalue()
    assert "0/2" in drawn
    lines = [line for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[A-Za-z]", drawn) if line]
    assert any(line.startswith("a-name-that-i: ") and line.rstrip().endswith("two seven") for line in lines)
    assert any(line.startswith("[b].wav: ") for line in lines)
    assert all(cell_len(line) <= 40 for line in lines)
    assert "RESULT" in lines
    assert drawn.rstrip().endswith("\x1b[2K")  # what was drawn last is erased


def shown_by(act: Callable[[Display, io.StringIO], None], files: int) -> list[str]:
    """Lines that a terminal was sent."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80, height=10, color_system=None)
    with Display(files, console) as display:
        act(display, terminal)
    return [line for line in re.split(r"[\r\n]|\x1b\[[0-9?]*[A-Za-z]", terminal.getvalue()) if line]


def test_the_bar_moves_within_a_file_and_never_back():
    def act(display: Display, _: io.StringIO) -> None:
        display.opened(0, 100.0)
        display.partial(0, "long.wav", "one", 40.0)
        display.partial(0, "long.wav", "one two", 20.0)  # a partial that does not say how far it reaches
        with display.hidden():  # and thereby drawn
            pass
        display.opened(1, 300.0)
        with display.hidden():
            pass
        display.done(0)

    lines = shown_by(act, 2)
    counts = [match[0] for line in lines if (match := re.search(r"\d/2 files.* s\b", line))]
    assert list(dict.fromkeys(counts)) == [
        "0/2 files, 40 of over 100 s",
        "0/2 files, 40 of 400 s",
        "1/2 files, 100 of 400 s",
    ]
    bars = [sum(map(line.count, "━╸")) for line in lines if "of 400 s" in line]
    assert all(bars)
    assert all(cell_len(line) <= 80 for line in lines)


def test_a_log_line_is_written_above_the_bar(capsys: pytest.CaptureFixture[str]):
    def act(display: Display, terminal: io.StringIO) -> None:
        display.opened(0, 1.0)
        logging.getLogger("oasr_core.somewhere").warning("a [b]long[/b] line :smile: %s", "x" * 100)
        with display.hidden():
            terminal.write("RESULT\n")
            logging.getLogger("oasr_core.somewhere").warning("meanwhile")

    with log_lines():
        lines = shown_by(act, 1)
        logging.getLogger("oasr_core.somewhere").warning("afterwards")
    assert f"warning: a [b]long[/b] line :smile: {'x' * 100}" in lines
    assert lines[lines.index("RESULT") + 1] == "warning: meanwhile"
    assert capsys.readouterr().err == "warning: afterwards\n"


def test_partial_lines_are_written_once_each(capsys: pytest.CaptureFixture[str]):
    display = Display(2, partial_lines=True)
    for text in ("", "one", "one", "one two"):
        display.partial(0, "a.wav", text, 1.28)
    assert capsys.readouterr().err == "   1.28 s  a.wav: one\n   1.28 s  a.wav: one two\n"
    display = Display(1, partial_lines=True)
    display.partial(0, "a.wav", "one", 12.0)
    assert capsys.readouterr().err == "  12.00 s  one\n"
