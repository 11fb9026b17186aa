"""Choosing the next token: greedy, by sampling, or as the best continuations of a beam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasr_core.staging import to_device


@dataclass(frozen=True)
class Sampling:
    """How the hypotheses of one request are grown.

    ``width`` hypotheses: searched together where ``beam`` holds, else drawn independently. ``temperature`` 0 takes the
    most probable token; above, tokens are drawn among the ``top_k`` most probable (0: all) that make up ``top_p`` of
    the probability.
    """

    width: int = 1
    beam: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def kind(self) -> tuple[int, bool]:
        """Requests of one kind can be decoded in one group."""
        return self.width, self.beam


@dataclass(frozen=True)
class Draw:
    """One hypothesis' way to draw: its settings and its own random numbers, so that neighbours do not matter."""

    sampling: Sampling
    generator: torch.Generator | None


def choose(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """The next token of each row of ``logits`` ``(rows, vocab)`` float32, and its log posterior.

    The log posterior is that of the given logits, whatever the temperature. It is NaN where the logits are.
    """
    best = logits.argmax(dim=-1)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0.0]
    if drawn:
        own = logits[drawn].cpu()  # one transfer, to where the random numbers are made
        best[drawn] = torch.stack([_draw(row, draws[i]) for row, i in zip(own, drawn, strict=True)]).to(best.device)
    log_probs = logits.gather(1, best[:, None])[:, 0] - logits.logsumexp(dim=-1)
    return best.tolist(), log_probs.tolist()


def _draw(logits: Tensor, draw: Draw) -> Tensor:
    """One token of ``(vocab,)`` logits; where they are not numbers, the first, as nothing can be drawn."""
    sampling = draw.sampling
    scaled = (logits - logits.max()) / sampling.temperature  # none overflows, however small the temperature is
    if 0 < sampling.top_k < scaled.shape[0]:
        limit = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < limit, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1)
        before[0] = 0.0  # the most probable token is always in
        scaled = scaled.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if not bool(torch.isfinite(probabilities).all()):
        return torch.zeros((), dtype=torch.int64)
    return torch.multinomial(probabilities, 1, generator=draw.generator)[0]


def best_continuations(logits: Tensor, scores: Sequence[Sequence[float]], ends: int = 1) -> tuple[list[list[int]], ...]:
    """The best continuations of each request's beam, so many that ``width`` of them are no ends.

    ``logits`` ``(requests, width, vocab)`` float32, ``scores`` of the hypotheses so far, each of which ``ends`` tokens
    can end. Returns parents, tokens, sums of log posteriors and the tokens' own, best first.
    """
    requests, width, vocab = logits.shape
    log_probs = logits.log_softmax(dim=-1)
    totals = log_probs + to_device(scores, torch.float32, logits.device)[:, :, None]
    return _top(totals, log_probs, min((1 + ends) * width, width * vocab), requests, vocab)


def best_openings(logits: Tensor, width: int, ends: int = 1) -> tuple[list[list[int]], ...]:
    """As :func:`best_continuations`, for the first token: ``(requests, vocab)`` logits of the one empty hypothesis."""
    requests, vocab = logits.shape
    log_probs = logits.log_softmax(dim=-1)
    return _top(log_probs, log_probs, min((1 + ends) * width, vocab), requests, vocab)


def _top(totals: Tensor, log_probs: Tensor, count: int, requests: int, vocab: int) -> tuple[list[list[int]], ...]:
    top = totals.reshape(requests, -1).topk(count)
    own = log_probs.reshape(requests, -1).gather(1, top.indices)
    indices = top.indices.tolist()
    parents = [[index // vocab for index in row] for row in indices]
    tokens = [[index % vocab for index in row] for row in indices]
    return parents, tokens, top.values.tolist(), own.tolist()
