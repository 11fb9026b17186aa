"""The stateful streaming backend: for encoders that declare no state but can stack and unstack it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, cast

from oasr_core.cache.attention import IntArray
from oasr_core.errors import PluginContractError
from oasr_core.models.base import CohortState
from oasr_core.streaming.cohort import CohortBackend

_METHODS = ("initial_streaming_state", "stack_streaming_states", "unstack_streaming_states")


class StatefulEncoder(Protocol):
    """What an encoder with ``streaming_kind="stateful"`` offers beside ``encode_chunk``."""

    def initial_streaming_state(self) -> Any:
        """The state of a new stream, of any type."""
        ...

    def stack_streaming_states(self, states: Sequence[Any]) -> Any:
        """One state for a batch, rows in the given order."""
        ...

    def unstack_streaming_states(self, state: Any) -> list[Any]:
        """The inverse: one state a row, none sharing memory that another row may change."""
        ...


class StackedState:
    """``ChunkBatch.state`` of a stateful encoder: it reads :attr:`value` and puts the next state in its place."""

    def __init__(self, value: Any) -> None:
        self.value = value


class StatefulBackend(CohortBackend):
    """One forward for all ready streams; the states are stacked before it and unstacked behind it."""

    oasr_api = "1.0"
    kind: ClassVar[str] = "stateful"

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Raises ``PluginContractError`` naming the method that the encoder lacks."""
        super().__init__(*args, **settings)
        missing = [name for name in _METHODS if not callable(getattr(self.encoder, name, None))]
        if missing:
            raise PluginContractError(
                f"{type(self.encoder).__name__} has streaming_kind='stateful' and lacks {', '.join(missing)}."
            )
        self._states: dict[str, Any] = {}

    def open(self, stream_id: str) -> None:
        """A row in the store bounds the number of streams; the state itself is the encoder's."""
        super().open(stream_id)
        self._states[stream_id] = self._stateful.initial_streaming_state()

    def close(self, stream_id: str) -> None:
        """Forget both."""
        super().close(stream_id)
        del self._states[stream_id]

    def cohort_state(self, stream_ids: Sequence[str], offsets: IntArray, counts: IntArray, frames: int) -> CohortState:
        """The states of the cohort, stacked."""
        stacked = self._stateful.stack_streaming_states([self._states[stream_id] for stream_id in stream_ids])
        return cast("CohortState", StackedState(stacked))

    def commit(self, stream_ids: Sequence[str], state: CohortState) -> None:
        """Unstack what the forward left."""
        value = cast("StackedState", state).value
        self._states.update(zip(stream_ids, self._stateful.unstack_streaming_states(value), strict=True))

    @property
    def _stateful(self) -> StatefulEncoder:
        return cast("StatefulEncoder", self.encoder)
