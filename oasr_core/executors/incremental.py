"""The incremental executor: autoregressive requests between prefill and their last token."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from oasr_core.decoding.budget import StepBudget
from oasr_core.decoding.incremental import IncrementalRequest, IncrementalStrategy, Progress
from oasr_core.decoding.options import DecodeOptions
from oasr_core.executors.failures import failed, is_out_of_memory
from oasr_core.executors.intake import Intake, Micro
from oasr_core.outputs import OutputProcessor, TextState
from oasr_core.request import Request, RequestOutput

logger = logging.getLogger(__name__)

#: Ticks in a row that may go by without a prefill because decoding used its budget up.
MAX_SKIPS = 4


@dataclass(slots=True)
class _Live:
    """A request that is being decoded."""

    request: Request
    text: TextState
    partials: int = 0


class IncrementalExecutor:
    """A tick decodes under the budget, then prefills one micro-batch where slots and memory are free.

    A tick that used its budget up prefills nothing, but no more than :data:`MAX_SKIPS` times in a row, so that neither
    starves the other.
    """

    def __init__(
        self,
        intake: Intake,
        strategy: IncrementalStrategy,
        outputs: OutputProcessor,
        options: DecodeOptions,
        *,
        max_slots: int,
        partial_interval: int = 1,
    ) -> None:
        self._intake = intake
        self._strategy = strategy
        self._outputs = outputs
        self._steps = options.decode_steps_per_tick
        self._seconds = options.max_tick_ms / 1000.0 if options.max_tick_ms else None
        self._max_slots = max_slots
        self._partial_interval = partial_interval
        self._live: dict[str, _Live] = {}
        #: Micro-batches that the scheduler gave and nobody has prefilled yet.
        self._backlog: deque[Micro] = deque()
        self._skips = 0

    @property
    def in_flight(self) -> int:
        """Requests that have left the queue and not ended."""
        return len(self._live) + sum(len(rows) for rows, _ in self._backlog)

    @property
    def room(self) -> int:
        """Requests that the scheduler may hand over now; none while some wait here."""
        return 0 if self._backlog else self._max_slots - len(self._live)

    def requests(self) -> list[Request]:
        """Every request that is in flight."""
        return [live.request for live in self._live.values()] + [row for rows, _ in self._backlog for row in rows]

    def run(self, batch: Sequence[Request]) -> list[RequestOutput]:
        """One tick: partials and terminal outputs."""
        outputs, micros = self._intake.split(batch)
        self._backlog.extend(micros)
        budget = StepBudget(self._steps, self._seconds)
        outputs += self._decode(budget)
        if not self._backlog:
            return outputs
        if budget.spent and self._strategy.has_pending() and self._skips < MAX_SKIPS:
            self._skips += 1
            return outputs
        self._skips = 0
        return outputs + self._prefill()

    def close(self, request: Request) -> None:
        """Forget a request that has ended or is withdrawn; whatever the strategy holds of it is given back."""
        self._live.pop(request.request_id, None)
        try:
            self._strategy.cancel(request.request_id)
        except Exception:
            logger.exception("cancelling %s in the decode strategy failed", request.request_id)
        self._backlog = deque(
            (kept, packed) for rows, packed in self._backlog if (kept := [row for row in rows if row is not request])
        )

    def interrupted(self, request: Request, output: RequestOutput) -> RequestOutput:
        """A terminal output with what the partials of a request have shown so far."""
        live = self._live.get(request.request_id)
        if live is not None:
            live.text.show_in(output)
        return output

    def _decode(self, budget: StepBudget) -> list[RequestOutput]:
        if not self._strategy.has_pending():
            return []
        try:
            progress = self._strategy.advance(budget)
        except Exception as error:  # the protocol allows none: whatever the strategy still holds cannot be trusted
            return self._failed([live.request for live in self._live.values()], "decode_step", error)
        outputs: list[RequestOutput] = []
        for each in progress:
            live = self._live.get(each.request_id)
            if live is None:
                logger.error("the decode strategy told of %s, which is not in flight", each.request_id)
                continue
            outputs += self._told(live, each)
        return outputs

    def _told(self, live: _Live, progress: Progress) -> list[RequestOutput]:
        error = progress.error
        if error is not None:
            return self._failed([live.request], "decode_oom" if is_out_of_memory(error) else "decode_step", error)
        if progress.hypotheses is None:
            return []
        try:
            if progress.finished:
                return [self._intake.final(live.request, progress.hypotheses)]
            live.partials += 1
            due = self._partial_interval > 0 and live.partials % self._partial_interval == 0
            if not (due and live.request.shows_partials):
                return []
            request = live.request
            return [self._outputs.partial(live.text, request.request_id, progress.hypotheses, request.decoding)]
        except Exception as caught:
            return self._failed([live.request], "decode_step", caught)

    def _prefill(self) -> list[RequestOutput]:
        """The next micro-batch, or as much of it as there are slots and memory for."""
        waiting, packed = self._backlog[0]
        rows: list[Request] = []
        for request in waiting[: self._max_slots - len(self._live)]:
            if not self._strategy.reserve(IncrementalRequest(request.request_id, request.decoding)):
                break
            rows.append(request)
        rest = waiting[len(rows) :]
        if rest:
            self._backlog[0] = rest, packed
        else:
            self._backlog.popleft()
        if rows:
            try:
                return self._contained(rows, packed)
            except BaseException:  # an interrupt: what has not begun is still here, to be failed with the rest
                self._backlog.appendleft(([row for row in rows if row.request_id not in self._live], packed))
                raise
        if self._live:
            return []  # what is in flight will give slots and memory back
        stuck = rest[0]
        error = MemoryError(
            "the decoder memory that this request may need is not free, and nothing will free it; raise "
            "decode_kv_budget_gib, or lower max_new_tokens or beam_size"
        )
        return self._failed([stuck], "prefill_oom", error)

    def _contained(self, rows: list[Request], packed: bool) -> list[RequestOutput]:
        """Prefill; on failure once more one request at a time, except where memory ran out."""
        try:
            self._run(rows, packed)
        except Exception as error:
            if is_out_of_memory(error):
                return self._failed(rows, "prefill_oom", error)
            if len(rows) == 1:
                return self._failed(rows, "offline_forward", error)
        else:
            return []
        return [output for request in rows for output in self._contained([request], packed)]

    def _run(self, rows: list[Request], packed: bool) -> None:
        out = self._intake.encode(rows, packed)
        live = [_Live(request, self._outputs.open()) for request in rows]
        self._strategy.begin_offline(out, [IncrementalRequest(row.request_id, row.decoding) for row in rows])
        for each in live:
            each.request.audio = None  # nothing reads it again
            self._live[each.request.request_id] = each

    def _failed(self, requests: Sequence[Request], stage: str, error: Exception) -> list[RequestOutput]:
        outputs = failed(requests, stage, error)
        return [self.interrupted(request, output) for request, output in zip(requests, outputs, strict=True)]
