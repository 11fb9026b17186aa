"""What a terminal shows while files are transcribed: a progress bar and live partial transcripts."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oasr_core.cli.logs import lines_through

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.live import Live

_SECONDS_BETWEEN_DRAWINGS = 0.05


def say(message: str) -> None:
    """A line on standard error."""
    sys.stderr.write(message + "\n")
    sys.stderr.flush()


def terminal() -> Console | None:
    """Standard error as a terminal, or ``None`` where it is none."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True)


@dataclass(slots=True)
class _File:
    """Seconds of a file's audio: all of it, and how much is transcribed. A file without audio has none."""

    seconds: float = 0.0
    reached: float = 0.0
    done: bool = False


class Display:
    """Progress bar and live partial transcripts at the bottom of the terminal; nothing where there is no terminal.

    The bar counts seconds of audio, so that it moves within a long file. Log lines are written above it. With
    ``partial_lines`` a partial is a line that stays, on a terminal or not.
    """

    def __init__(self, total: int, console: Console | None = None, *, partial_lines: bool = False) -> None:
        self._total = total
        self._partial_lines = partial_lines
        self._partials: dict[int, tuple[str, str]] = {}
        self._files: dict[int, _File] = {}
        self._drawn = -math.inf
        self._logs = ExitStack()
        self._live: Live | None = None
        if console is not None:
            self._live = self._build(console)

    def _build(self, console: Console) -> Live:
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        text = TextColumn("{task.description}")
        self._progress = Progress(TextColumn("transcribing"), BarColumn(None), text, TimeElapsedColumn(), expand=True)
        self._task = self._progress.add_task(self._count(0.0, 0.0))
        return Live(
            get_renderable=self._picture,
            console=console,
            refresh_per_second=5,
            transient=True,
            redirect_stdout=False,  # results go to a standard output that may be a pipe
            redirect_stderr=False,
        )

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
            self._logs.enter_context(lines_through(self._above))
        return self

    def __exit__(self, *_: object) -> None:
        self._logs.close()
        if self._live is not None:
            self._live.stop()

    def headline(self, text: str) -> None:
        """One line above everything else."""
        if self._live is not None:
            with self.hidden():
                say(text)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Take the display away while something else is written."""
        if self._live is None:
            yield
            return
        self._live.stop()
        try:
            yield
        finally:
            self._live.start()

    def opened(self, index: int, seconds: float) -> None:
        """A file with so much audio is under way."""
        self._files[index] = _File(seconds)
        self._advance()

    def partial(self, index: int, file: str, text: str, seconds: float) -> None:
        """Show what has been recognised of a file in its first ``seconds`` of audio."""
        changed = self._partials.get(index, (file, ""))[1] != text
        self._partials[index] = (file, text)
        known = self._files.setdefault(index, _File())
        known.reached = max(known.reached, min(seconds, known.seconds))
        self._advance()
        if self._partial_lines:
            if changed:
                with self.hidden():
                    say(f"{seconds:7.2f} s  {f'{file}: ' if self._total > 1 else ''}{text}")
        elif self._live is not None and time.monotonic() - self._drawn > _SECONDS_BETWEEN_DRAWINGS:
            self._live.refresh()
            self._drawn = time.monotonic()

    def done(self, index: int) -> None:
        """A file is finished: its line goes, the bar advances."""
        self._partials.pop(index, None)
        known = self._files.setdefault(index, _File())
        known.reached, known.done = known.seconds, True
        self._advance()

    def _advance(self) -> None:
        """Move the bar; files that are not open yet count as long as the mean of the others."""
        if self._live is None:
            return
        reached = math.fsum(file.reached for file in self._files.values())
        known = math.fsum(file.seconds for file in self._files.values())
        expected = known * self._total / max(len(self._files), 1)
        self._progress.update(self._task, completed=reached, total=expected, description=self._count(reached, known))

    def _count(self, reached: float, known: float) -> str:
        files = f"{sum(file.done for file in self._files.values())}/{self._total} files"
        if not known:
            return files
        more = "over " if len(self._files) < self._total else ""
        return f"{files}, {reached:.0f} of {more}{known:.0f} s"

    def _above(self, line: str) -> None:
        """Write a line above what is shown."""
        from rich.text import Text

        if self._live is not None:
            self._live.console.print(Text(line), soft_wrap=True)

    def _picture(self) -> RenderableType:
        from rich.console import Group

        if self._partial_lines:
            return self._progress
        # Copied, because Live draws on a thread of its own too.
        lines = [_Partial(file, text) for _, (file, text) in sorted(self._partials.copy().items())]
        return Group(self._progress, *lines)


@dataclass(frozen=True, slots=True)
class _Partial:
    """The end of a partial transcript, as much of it as one terminal line holds."""

    file: str
    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.cells import cell_len, set_cell_size
        from rich.text import Text

        name = Path(self.file).name
        name = set_cell_size(name, min(cell_len(name), options.max_width // 3))
        room = options.max_width - cell_len(name) - 2
        tail = self.text[-room:]
        while cell_len(tail) > room:
            tail = tail[1:]
        yield Text(f"{name}: {tail}", no_wrap=True)
