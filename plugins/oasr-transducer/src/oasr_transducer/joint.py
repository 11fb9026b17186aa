"""The joint network as the searches see it: logits of the labels, and of durations where there are any."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oasr_core.errors import PluginContractError
from oasr_core.models.base import TransducerInterface


class Constants(NamedTuple):
    """On a device: ids of the labels that say nothing (blank and, where the model has it, unk), what is subtracted
    from the logits of the labels, and the durations in frames.
    """

    silent: Tensor
    penalty: Tensor | None
    durations: Tensor | None


class Joint:
    """Projects encoder outputs and gives logits; ``silent`` labels say nothing."""

    def __init__(self, interface: TransducerInterface, blank_penalty: float) -> None:
        self.blank_id = int(interface.blank_id)
        self.silent = [self.blank_id] if interface.unk_id is None else [self.blank_id, int(interface.unk_id)]
        self.vocab_size = int(interface.vocab_size)
        self.durations = interface.durations
        self._joiner = interface.joiner
        self._width = self.vocab_size + len(self.durations or ())
        self._blank_penalty = blank_penalty
        self._constants: dict[torch.device, Constants] = {}

    def constants(self, device: torch.device) -> Constants:
        """Made once for each device: a copy to it at every step would make the host wait."""
        known = self._constants.get(device)
        if known is None:
            penalty = None
            if self._blank_penalty:
                penalty = torch.zeros(self.vocab_size, device=device)
                penalty[self.blank_id] = self._blank_penalty
            durations = None if self.durations is None else torch.tensor(self.durations, device=device)
            known = Constants(torch.tensor(self.silent, device=device), penalty, durations)
            self._constants[device] = known
        return known

    def project(self, hidden: Tensor) -> Tensor:
        """``(..., dim)`` to ``(..., joint_dim)``."""
        return self._joiner.project_encoder(hidden)

    def logits(self, encoder: Tensor, predictor: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits ``(..., vocab)`` of the labels and ``(..., durations)`` float32; leading dimensions broadcast."""
        logits = self._joiner.joint(encoder, predictor).float()
        if logits.shape[-1] != self._width:
            raise PluginContractError(
                f"The joiner of interface 'transducer' gave {logits.shape[-1]} logits; vocab_size={self.vocab_size} "
                f"and durations={self.durations} make {self._width}."
            )
        durations = None
        if self.durations is not None:
            logits, durations = logits[..., : self.vocab_size], logits[..., self.vocab_size :]
        penalty = self.constants(logits.device).penalty
        return logits if penalty is None else logits - penalty, durations
