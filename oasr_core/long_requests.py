"""Parents and children: one long request outside, several windows inside."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from oasr_core.executors.failures import failed
from oasr_core.longform.plan import LongFormPlan
from oasr_core.request import Request, RequestOutput


@dataclass
class _Parent:
    request: Request
    audio: Tensor
    plan: LongFormPlan
    #: The windows that are in the engine, and the index of each in the plan.
    children: dict[str, Request] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)
    #: Whether its terminal output has been made.
    ended: bool = False
    windows_done: int = 0


class LongRequests:
    """Long requests that are under way, each with the windows that are in the engine for it."""

    def __init__(self, attach: Callable[[Request, Tensor], None], *, partial_interval: int = 1) -> None:
        """``attach`` stamps a window's audio on a child; a partial follows every ``partial_interval`` windows."""
        self._attach = attach
        self._partial_interval = partial_interval
        self._parents: dict[str, _Parent] = {}
        self._parent_of: dict[str, str] = {}

    def open(self, request: Request, plan: LongFormPlan) -> tuple[list[RequestOutput], list[Request]]:
        """Take in a long request; its output where there is nothing to decode, and its first children."""
        if request.audio is None:
            raise RuntimeError(f"long request {request.request_id!r} has no audio")
        audio, request.audio = request.audio, None
        parent = _Parent(request, audio, plan)
        self._parents[request.request_id] = parent
        more = self._more(parent, {})
        parent.ended = plan.done
        return [plan.result(request.request_id)] if plan.done else [], more

    def find(self, request_id: str) -> Request | None:
        """The parent of this id."""
        parent = self._parents.get(request_id)
        return None if parent is None else parent.request

    def parents(self) -> list[Request]:
        """Every long request that is under way."""
        return [parent.request for parent in self._parents.values()]

    def is_child(self, request_id: str) -> bool:
        """Whether a request is a window of a long one."""
        return request_id in self._parent_of

    def count_working(self, in_flight: Iterable[Request]) -> tuple[int, int]:
        """How many long requests have a window among ``in_flight``, and how many of those are windows."""
        owners = [self._parent_of[each.request_id] for each in in_flight if each.request_id in self._parent_of]
        return len(set(owners)), len(owners)

    def count_idle(self, working: int, windows: int) -> tuple[int, int]:
        """How many long requests wait, and how many windows do, where :meth:`count_working` gave these."""
        return len(self._parents) - working, len(self._parent_of) - windows

    def take(self, output: RequestOutput) -> tuple[list[RequestOutput], list[Request]]:
        """A child has ended: what the parent has to say, and the children that come next."""
        parent = self._parents[self._parent_of.pop(output.request_id)]
        parent.children.pop(output.request_id)
        index = parent.indices.pop(output.request_id)
        if parent.ended:  # by another child of the same step
            return [], []
        request_id = parent.request.request_id
        more: list[Request] = []
        try:
            more = self._more(parent, {index: output})
            parent.ended = parent.plan.done
            parent.windows_done += 1
            if not parent.ended:
                return self._partial(parent), more
            told = parent.plan.result(request_id)
            if told.finish_reason in ("error", "abort"):
                told = self.interrupted(parent.request, told)
        except Exception as error:
            parent.ended = True
            return failed([parent.request], "long_form", error), more
        return [told], more

    def _partial(self, parent: _Parent) -> list[RequestOutput]:
        if self._partial_interval <= 0 or parent.windows_done % self._partial_interval:
            return []
        output = parent.plan.partial(parent.request.request_id)
        output.consumed_seconds = parent.plan.progress
        return [output]

    def interrupted(self, request: Request, output: RequestOutput) -> RequestOutput:
        """A terminal output with what the partials of a long request have shown so far."""
        parent = self._parents.get(request.request_id)
        if parent is not None:
            shown = parent.plan.partial(request.request_id)
            output.text, output.stable_prefix_chars = shown.text, shown.stable_prefix_chars
            output.tokens, output.nbest_texts = shown.tokens, shown.nbest_texts
        return output

    def close(self, request_id: str) -> list[Request]:
        """Forget a long request; returns the children that are still in the engine."""
        parent = self._parents.pop(request_id)
        for child in parent.children:
            self._parent_of.pop(child, None)
        return list(parent.children.values())

    def _more(self, parent: _Parent, outputs: Mapping[int, RequestOutput]) -> list[Request]:
        request = parent.request
        children: dict[int, Request] = {}
        for spec in parent.plan.next(outputs):
            # No id that a caller chose can be one of these.
            name = f"{request.request_id}#{spec.index}-{uuid.uuid4().hex}"
            decoding = request.decoding.model_copy(update=dict(spec.decoding))
            children[spec.index] = Request(name, False, decoding, request.priority, shows_partials=False)
            self._attach(children[spec.index], parent.audio[spec.start : spec.end])
        for index, child in children.items():
            parent.children[child.request_id] = child
            parent.indices[child.request_id] = index
            self._parent_of[child.request_id] = request.request_id
        return list(children.values())
