"""The step loop: schedule, run both executors, release what has ended, hand each output to its one consumer."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Sequence

from oasr_core.engine_parts import EngineParts
from oasr_core.executors.failures import failed
from oasr_core.hooks import Observers
from oasr_core.long_requests import LongRequests
from oasr_core.longform.plan import LongFormPlan
from oasr_core.request import Request, RequestOutput
from oasr_core.scheduling.scheduler import SchedulerOutput

logger = logging.getLogger(__name__)

#: How many ended requests are remembered, to tell "has finished" from "never was".
_REMEMBERED = 4096


class StepLoop:
    """One engine's requests between admission and delivery. The engine's lock covers every call."""

    def __init__(self, parts: EngineParts, observers: Observers, long: LongRequests) -> None:
        self._scheduler = parts.scheduler
        self._offline = parts.offline
        self._incremental = parts.incremental
        self._streaming = parts.streaming
        self._observers = observers
        self._long = long
        self._ended: OrderedDict[str, None] = OrderedDict()
        #: Outputs that nobody owns and nobody has collected.
        self.ready: deque[RequestOutput] = deque()
        #: Requests of ``transcribe`` calls, with their terminal output once it is there.
        self.owned: dict[str, RequestOutput | None] = {}
        #: Requests whose audio another thread is still preparing.
        self.preparing: dict[str, Request] = {}
        #: Whether the last tick did anything.
        self.progressed = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, for a batch, or for their preparation; a long one counts once."""
        requests, windows = self._long.count_idle(*self._long.count_working(self._decoding))
        return self._scheduler.num_waiting - windows + requests + len(self.preparing)

    @property
    def num_running(self) -> int:
        """Streams that hold a place, and requests whose tokens are being generated."""
        requests, windows = self._long.count_working(self._decoding)
        return self._scheduler.num_running + len(self._decoding) - windows + requests

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any output uncollected."""
        return bool(self.num_running or self.num_waiting or self.ready)

    def lookup(self, request_id: str) -> Request | None:
        """A request that has not ended; a window of a long one is nobody's."""
        return None if self._long.is_child(request_id) else self._find(request_id)

    def has_ended(self, request_id: str) -> bool:
        """Whether a request of this id has ended not long ago."""
        return request_id in self._ended

    def unfinished(self) -> list[Request]:
        """Every request that has not ended."""
        queued = [r for r in self._scheduler.requests() if not self._long.is_child(r.request_id)]
        return [*queued, *self.preparing.values(), *self._long.parents()]

    def admit(self, request: Request, plan: LongFormPlan | None = None) -> None:
        """Queue a request, or the first windows of a long one, which has a ``plan``."""
        told, queued = ([], [request]) if plan is None else self._long.open(request, plan)
        for each in queued:
            self._scheduler.add(each)
        self._observers.notify("oasr_request_admitted", request_id=request.request_id, streaming=request.streaming)
        self.deliver(told)

    def abort(self, request: Request) -> None:
        """End a request now."""
        output = RequestOutput(request.request_id, finished=True, finish_reason="abort")
        if self._streaming is not None and request.streaming:
            output = self._streaming.interrupted(request, output)
        elif self._long.find(request.request_id) is request:
            output = self._long.interrupted(request, output)
        elif self._incremental is not None:
            output = self._incremental.interrupted(request, output)
        self.deliver([output])

    def tick(self) -> None:
        """One step. What escapes the executors' containment fails the requests of this step, never the engine."""
        begun = time.perf_counter()
        schedule = self._scheduler.schedule(self._incremental.room if self._incremental is not None else None)
        outputs: list[RequestOutput] = []
        told: list[RequestOutput] = []
        try:
            self._advance(schedule, outputs)
        except BaseException as error:
            outputs += self._in_flight(schedule, outputs, error)
            if not isinstance(error, Exception):
                raise
        finally:
            told += self.deliver(outputs)
        self._observers.notify("oasr_step_done", outputs=told, seconds=time.perf_counter() - begun)

    def deliver(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Release all that has ended, then hand out, then tell the observers (who may call the engine).

        Returns what was handed out: in place of a window's output what its long request has to say.
        """
        told: list[RequestOutput] = []
        pending = deque(outputs)
        while pending:
            output = pending.popleft()
            request = self._find(output.request_id)
            if request is None:
                logger.error("an output after the end of request %s is dropped: %s", output.request_id, output)
                continue
            if self._long.is_child(output.request_id):
                if output.finished:
                    pending.extend(self._child_ended(request, output))
                continue
            told.append(output)
            if output.finished:
                self._release(request)
            if output.request_id not in self.owned:
                self.ready.append(output)
            elif output.finished:
                self.owned[output.request_id] = output
        for output in told:
            if output.finished:
                self._observers.notify("oasr_request_finished", output=output)
        return told

    @property
    def _decoding(self) -> list[Request]:
        return [] if self._incremental is None else self._incremental.requests()

    def _find(self, request_id: str) -> Request | None:
        found = self._scheduler.find_request(request_id) or self.preparing.get(request_id)
        return found or self._long.find(request_id)

    def _child_ended(self, child: Request, output: RequestOutput) -> list[RequestOutput]:
        """Release a window of a long request and queue the ones that follow; returns what the parent has to say."""
        self._release(child, child=True)
        told, more = self._long.take(output)
        for request in more:
            self._scheduler.add(request)
        self.progressed = True
        return told

    def _advance(self, schedule: SchedulerOutput, outputs: list[RequestOutput]) -> None:
        self.progressed = bool(schedule.offline_batch or schedule.newly_admitted)
        running = [request for request in schedule.running_streams if self._opened(request, outputs)]
        if schedule.offline_batch and self._offline is not None:
            outputs += self._offline.run(schedule.offline_batch)
        if self._incremental is not None and (schedule.offline_batch or self._incremental.in_flight):
            self.progressed = True
            outputs += self._incremental.run(schedule.offline_batch)
        if running and self._streaming is not None:
            streamed = self._streaming.step(running)
            self.progressed |= streamed.progressed
            outputs += streamed.outputs

    def _opened(self, request: Request, outputs: list[RequestOutput]) -> bool:
        """Give an admitted stream its state; a failure is that stream's own."""
        if self._streaming is None:
            raise RuntimeError("a stream was admitted by an engine without a streaming executor")
        if self._streaming.is_open(request):
            return True
        try:
            self._streaming.open(request)
        except Exception as error:
            outputs += failed([request], "streaming_forward", error)
            return False
        return True

    def _in_flight(
        self, schedule: SchedulerOutput, outputs: Sequence[RequestOutput], error: BaseException
    ) -> list[RequestOutput]:
        """Errors for the requests of this step that have no terminal output: half a step cannot be resumed."""
        ended = {output.request_id for output in outputs if output.finished}
        lost: list[RequestOutput] = []
        for requests, stage in (
            (schedule.offline_batch, "offline_forward"),
            ([request for request in self._decoding if request not in schedule.offline_batch], "decode_step"),
            (schedule.running_streams, "streaming_forward"),
        ):
            rest = [request for request in requests if request.request_id not in ended]
            lost += failed(rest, stage, error) if rest else []
        return lost

    def _release(self, request: Request, *, child: bool = False) -> None:
        if self._long.find(request.request_id) is request:
            for window in self._long.close(request.request_id):
                self._release(window, child=True)
        elif self.preparing.pop(request.request_id, None) is None:
            self._scheduler.finish_request(request.request_id)
        if self._streaming is not None and request.streaming:
            self._streaming.close(request)
        elif self._incremental is not None:
            self._incremental.close(request)
        if child:
            return
        self._ended[request.request_id] = None
        self._ended.move_to_end(request.request_id)
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
