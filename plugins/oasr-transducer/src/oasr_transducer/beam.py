"""One frame of modified beam search, for the beams of many utterances at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from oasr_transducer.automaton import Automaton
from oasr_transducer.joint import Joint
from oasr_transducer.prediction import Prediction, Predictor

_INF = math.inf
# Odd multipliers of a 64-bit mixer.
_MIX_FIRST = -0x61C8864680B583EB
_MIX_SECOND = -0x40A7B892E31B1A47


class Beams(NamedTuple):
    """Hypotheses ``(streams, beam)``; unused places have ``log_prob`` -inf.

    ``log_prob`` is the summed probability of the alignments in the beam, without the context; ``kept`` what completed
    hotwords gave and ``state`` the place in the context graph. ``hash`` and ``length`` tell token sequences apart.
    """

    log_prob: Tensor
    kept: Tensor
    hash: Tensor
    length: Tensor
    state: Tensor


class Steps(NamedTuple):
    """Of each hypothesis behind a frame: its place in the beam before, the token that it emitted (-1: none) and the
    token's log posterior; ``invalid`` says which streams had a frame without posteriors.
    """

    parent: Tensor
    token: Tensor
    log_prob: Tensor
    invalid: Tensor


class _Candidates(NamedTuple):
    """Continuations ``(streams, beam, candidates)`` of each hypothesis; ``token`` is -1 for a silent label.

    ``kept``, ``pending`` and ``state`` are those of the context behind the token.
    """

    token: Tensor
    log_prob: Tensor
    kept: Tensor
    pending: Tensor
    state: Tensor


class BeamStep:
    """Extends every hypothesis by every label, keeps the best and adds up those that spell the same.

    A silent label leaves a hypothesis as it is. Equal candidates keep the order of their hypotheses, silent labels
    first. Hypotheses are merged behind the choice, so that a beam may hold fewer than it could.
    """

    def __init__(self, joint: Joint, predictor: Predictor) -> None:
        self._joint = joint
        self._predictor = predictor

    def advance(
        self, beams: Beams, prediction: Prediction, frames: Tensor, automaton: Automaton | None, roots: Tensor
    ) -> tuple[Beams, Prediction, Steps]:
        """One frame ``frames`` ``(streams, joint_dim)``; ``prediction`` has a row for each place, stream after stream.

        ``roots`` ``(streams,)`` are states of ``automaton``.
        """
        streams, width = beams.log_prob.shape
        logits, _ = self._joint.logits(frames[:, None], prediction.out.view(streams, width, -1))
        posteriors = logits.log_softmax(dim=2)
        invalid = (posteriors[..., self._joint.blank_id].isnan() & (beams.log_prob > -_INF)).any(dim=1)
        found = self._in_context(beams, *self._labels(posteriors, automaton), automaton, roots)
        total = beams.log_prob[..., None] + found.log_prob
        rank = (total + found.kept + found.pending).flatten(1)
        chosen = rank.sort(dim=1, descending=True, stable=True)[1][:, :width]
        parent = chosen // found.token.shape[2]

        def taken(values: Tensor) -> Tensor:
            return values.flatten(1).gather(1, chosen)

        token, log_prob = taken(found.token), taken(total)
        speaks = (token >= 0) & (log_prob > -_INF)
        spelled, length = beams.hash.gather(1, parent), beams.length.gather(1, parent) + speaks.long()
        spelled = torch.where(speaks, _mix(spelled, token), spelled)
        following = Beams(_merge(log_prob, spelled, length), taken(found.kept), spelled, length, taken(found.state))
        rows = torch.arange(streams, device=parent.device)[:, None] * width + parent
        prediction = self._predictor.follow(prediction, rows.flatten(), token.clamp(min=0).flatten(), speaks.flatten())
        return following, prediction, Steps(parent, torch.where(speaks, token, -1), taken(found.log_prob), invalid)

    def _labels(self, posteriors: Tensor, automaton: Automaton | None) -> tuple[Tensor, Tensor]:
        """Candidates and their log posteriors: silent labels, the best of the others, all that a context may prefer.

        A label outside the context changes a hypothesis' context score as any other such label does: as many of the
        best of them as the beam is wide hold all that can survive.
        """
        apart = self._joint.constants(posteriors.device).silent
        silent = posteriors.index_select(2, apart)
        tokens, log_probs = [torch.full_like(silent, -1, dtype=torch.int64)], [silent]
        if automaton is not None:
            apart = torch.cat([apart, automaton.tokens])
            named = posteriors.index_select(2, automaton.tokens)
            tokens.append(automaton.tokens.expand_as(named))
            log_probs.append(named)
        others = posteriors.index_fill(2, apart, -_INF)
        best, labels = others.topk(min(others.shape[1], others.shape[2]), dim=2)
        return torch.cat([*tokens, labels], dim=2), torch.cat([*log_probs, best], dim=2).double()

    def _in_context(
        self, beams: Beams, token: Tensor, log_prob: Tensor, automaton: Automaton | None, roots: Tensor
    ) -> _Candidates:
        kept, state = beams.kept[..., None].expand_as(token), beams.state[..., None].expand_as(token)
        if automaton is None:
            return _Candidates(token, log_prob, kept, torch.zeros_like(kept), state)
        silent = token < 0
        state = torch.where(silent, state, automaton.follow(state, token.clamp(min=0), roots[:, None, None]))
        kept = kept + torch.where(silent, 0.0, automaton.reward[state])
        return _Candidates(token, log_prob, kept, automaton.pending[state], state)


def _merge(log_prob: Tensor, spelled: Tensor, length: Tensor) -> Tensor:
    """Log probabilities where the first of equal hypotheses has the sum of all, and the others are gone."""
    alive = log_prob > -_INF
    same = (spelled[:, :, None] == spelled[:, None, :]) & (length[:, :, None] == length[:, None, :])
    same &= alive[:, :, None] & alive[:, None, :]
    # The first of equal ones has the largest probability, so that nothing overflows there.
    total = log_prob + torch.where(same, (log_prob[:, None, :] - log_prob[:, :, None]).exp(), 0.0).sum(dim=2).log()
    again = same.tril(diagonal=-1).any(dim=2)
    return torch.where(alive & ~again, total, -_INF)


def _mix(spelled: Tensor, token: Tensor) -> Tensor:
    mixed = (spelled + token + 1) * _MIX_FIRST
    return (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * _MIX_SECOND
