"""The contract of the ``oasr.converters`` axis.

``detect`` runs in a module that imports neither torch nor the model; it reads a checkpoint only through
:class:`~oasr_core.checkpoints.peek.CheckpointPeek`. What a converter looks for is data, so that a refusal can list it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from oasr_core.checkpoints.bundle import CheckpointBundle
    from oasr_core.checkpoints.peek import CheckpointPeek

#: Ranks of a detection, by the kind of positive marker that was found.
RANK_KEYED_VALUE = 30
RANK_NAMED_CONFIG = 20
RANK_ASSET_LAYOUT = 10


@dataclass(frozen=True)
class Detection:
    """A converter's claim: how specific its marker is, and which marker it was."""

    rank: int
    reason: str


class CheckpointConverter(ABC):
    """Recognises one checkpoint format and converts it to a :class:`CheckpointBundle`."""

    #: What a human should know of the markers that :meth:`detect` looks for.
    looks_for: ClassVar[tuple[str, ...]]
    #: Architectures that :meth:`convert` can produce.
    architectures: ClassVar[tuple[str, ...]]
    #: The weights file that is read unless ``checkpoint_name`` says otherwise.
    default_checkpoint_name: ClassVar[str | None] = None

    @abstractmethod
    def detect(self, peek: CheckpointPeek) -> Detection | None:
        """Claim the checkpoint on positive markers only, or return ``None``."""

    @abstractmethod
    def convert(self, peek: CheckpointPeek, *, checkpoint_name: str | None = None) -> CheckpointBundle:
        """Read everything; raises ``CheckpointError`` naming the file at fault."""
