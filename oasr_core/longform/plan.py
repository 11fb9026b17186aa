"""The parent of a long request: which windows are decoded when, and what they add up to.

Plans know no engine: whoever runs one starts the children that :meth:`LongFormPlan.next` names, hands their terminal
outputs back, and aborts the children that still run when the plan is done or the parent is aborted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oasr_core.longform.stitch import Stitcher
from oasr_core.request import RequestOutput
from oasr_core.tokenizers.base import Tokenizer

#: Seconds by which every child advances at least, and of audio below which no child is started for what is left.
LEAST_ADVANCE, LEAST_WINDOW = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One window to decode: samples ``start`` to before ``end`` of the parent's audio.

    ``decoding`` holds the fields of ``DecodingOptions`` in which the child differs from its parent.
    """

    index: int
    start: int
    end: int
    decoding: Mapping[str, Any] = field(default_factory=dict)


class LongFormPlan(ABC):
    """Children of one request, and the output that they are stitched to."""

    def __init__(self, samples: int, sample_rate: int, tokenizer: Tokenizer, *, keep_words: bool = True) -> None:
        """For ``samples`` samples at ``sample_rate`` Hz; ``tokenizer`` tells which tokens spell which words.

        ``keep_words`` false leaves words out of the output, for children that had to time them anyway.
        """
        self.samples = samples
        self.sample_rate = sample_rate
        self._stitcher = Stitcher(tokenizer, keep_words)
        self._running: dict[int, ChildSpec] = {}
        self._failure: RequestOutput | None = None

    def next(self, outputs: Mapping[int, RequestOutput]) -> list[ChildSpec]:
        """Take terminal outputs by the index of their child (none at first); return the children to start now."""
        for index in sorted(outputs):
            child, output = self._running.pop(index), outputs[index]
            if self._failure is not None:
                continue
            if output.finish_reason in ("error", "abort"):
                self._failure = self._failed(child, output)
            else:
                self._take(child, output)
        if self._failure is not None:
            return []
        children = self._start()
        self._running.update((child.index, child) for child in children)
        return children

    @property
    def done(self) -> bool:
        """Whether :meth:`result` is final: everything is transcribed, or a child failed."""
        return self._failure is not None or self._complete

    @property
    @abstractmethod
    def progress(self) -> float:
        """Seconds of the audio that are dealt with."""

    def result(self, request_id: str) -> RequestOutput:
        """The terminal output, once :attr:`done`.

        Where a child failed (or was aborted), its reason and stage, and a message that names the window.
        """
        if self._failure is not None:
            failure = self._failure
            return RequestOutput(
                request_id,
                finished=True,
                finish_reason=failure.finish_reason,
                error_stage=failure.error_stage,
                error=failure.error,
            )
        return self._stitcher.result(request_id)

    def partial(self, request_id: str) -> RequestOutput:
        """The transcript of the windows that are finished from the start on, without what a seam may still change."""
        return self._stitcher.partial(request_id, self._next_start)

    @property
    @abstractmethod
    def _complete(self) -> bool:
        """Whether no window is left."""

    @property
    @abstractmethod
    def _next_start(self) -> float | None:
        """Where, in seconds, the window begins that is stitched next."""

    @abstractmethod
    def _take(self, child: ChildSpec, output: RequestOutput) -> None:
        """Note what a child found."""

    @abstractmethod
    def _start(self) -> list[ChildSpec]:
        """Children that may begin now."""

    def _seconds(self, samples: int) -> float:
        return samples / self.sample_rate

    def _position_behind(self, child: ChildSpec, output: RequestOutput) -> int:
        """The sample up to which a child's output accounts for its audio."""
        consumed = output.consumed_seconds
        if not consumed:
            return child.end
        return min(child.start + round(max(consumed, LEAST_ADVANCE) * self.sample_rate), child.end)

    def _failed(self, child: ChildSpec, output: RequestOutput) -> RequestOutput:
        start, end = self._seconds(child.start), self._seconds(child.end)
        message = f"window {child.index + 1} ({start:.2f} s to {end:.2f} s): {output.error or output.finish_reason}"
        return RequestOutput(
            output.request_id, finish_reason=output.finish_reason, error_stage=output.error_stage, error=message
        )
