"""The contract of the ``oasr.pretrained`` axis: models that are found by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar


class PretrainedModel(ABC):
    """A checkpoint with a name; an entry point refers to an *instance*.

    A subclass sets the attributes in its class body and says in :meth:`path` where the checkpoint lies (package data,
    or a download that it makes and caches). ``path`` is called when the model is used, never when models are listed.
    """

    #: One sentence for ``oasr models``.
    description: ClassVar[str]
    #: Licence of the weights, as an SPDX expression where there is one.
    licence: ClassVar[str]
    #: Primary language subtags, ``("en",)``.
    languages: ClassVar[tuple[str, ...]]
    #: Hz of the audio that the model was trained on.
    sample_rate: ClassVar[int]

    @property
    @abstractmethod
    def name(self) -> str:
        """The name that ``--model`` takes."""

    @abstractmethod
    def path(self) -> Path:
        """A checkpoint directory or file on this machine; raises ``CheckpointError`` where it cannot be had."""
