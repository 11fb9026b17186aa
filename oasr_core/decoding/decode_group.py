"""A group of requests that are decoded by one batched step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oasr_core.cache.decoder_kv import DecoderCache
from oasr_core.decoding.incremental import IncrementalRequest
from oasr_core.decoding.sampling import Draw, Sampling, best_continuations, best_openings, choose
from oasr_core.models.base import AutoregressiveInterface, DecoderMemory
from oasr_core.staging import to_device


@dataclass
class Candidate:
    """One hypothesis while it grows. ``score`` is the sum of log posteriors, that of the end token included; ``last``
    the token that the next step feeds.
    """

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    score: float = 0.0
    last: int = 0
    ended: bool = False
    reached_cap: bool = False

    def normalized(self, length_penalty: float) -> float:
        """Score that ranks hypotheses: the sum over the number of tokens (without end) to the ``length_penalty``."""
        return self.score / float(max(len(self.tokens), 1) ** length_penalty)


@dataclass
class Row:
    """One request while it is decoded.

    ``frames`` are the encoder frames of its audio, ``prompt`` the tokens before the generated ones (of which ``probe``
    is the index of one whose prediction the strategy wants to see), ``note`` what the strategy keeps of it.
    """

    request: IncrementalRequest
    frames: int
    prompt: list[int]
    sampling: Sampling
    max_new: int
    length_penalty: float = 1.0
    patience: float = 1.0
    probe: int | None = None
    generator: torch.Generator | None = None
    note: Any = None
    candidates: list[Candidate] = field(default_factory=list)
    ended: list[Candidate] = field(default_factory=list)
    error: Exception | None = None
    shown: int = -1

    @property
    def done(self) -> bool:
        """Whether nothing is left to generate."""
        if self.error is not None:
            return True
        if self.sampling.beam:
            return not self.candidates
        return all(candidate.ended for candidate in self.candidates)

    def ranked(self) -> list[Candidate]:
        """The hypotheses, best first: the ended ones, or while there are none those that grow."""
        found = self.ended or self.candidates
        return sorted(found, key=lambda candidate: candidate.normalized(self.length_penalty), reverse=True)


class MemoryRows:
    """A decoder memory whose rows come and go: spare capacity behind, a leaving row is replaced by the last."""

    def __init__(self, memory: DecoderMemory) -> None:
        self._tensors = memory
        self.count = len(memory[0]) if memory else 0

    @property
    def view(self) -> DecoderMemory:
        """The rows that are there."""
        return tuple(tensor[: self.count] for tensor in self._tensors)

    def row(self, index: int) -> DecoderMemory:
        """A view of one row, good until rows leave."""
        return tuple(tensor[index : index + 1] for tensor in self._tensors)

    def fits(self, other: MemoryRows) -> bool:
        """Whether the rows of ``other`` are of the same shape."""
        pairs = zip(self._tensors, other._tensors, strict=True)
        return all(mine.shape[1:] == theirs.shape[1:] for mine, theirs in pairs)

    def grow(self, more: int, most: int) -> None:
        """Be able to take in ``more`` rows; spare capacity is made for up to ``most`` in all."""
        wanted = self.count + more
        if self._tensors and wanted > len(self._tensors[0]):
            capacity = max(wanted, min(2 * self.count, most))
            grown = tuple(tensor.new_empty((capacity, *tensor.shape[1:])) for tensor in self._tensors)
            for new, old in zip(grown, self._tensors, strict=True):
                new[: self.count] = old[: self.count]
            self._tensors = grown

    def extend(self, other: MemoryRows) -> None:
        """Append rows that :meth:`grow` has made room for."""
        for mine, theirs in zip(self._tensors, other.view, strict=True):
            mine[self.count : self.count + other.count] = theirs
        self.count += other.count

    def drop(self, index: int) -> None:
        """Remove a row; the last takes its place."""
        self.count -= 1
        if index != self.count:
            for tensor in self._tensors:
                tensor[index] = tensor[self.count]


#: Forbids tokens: ``(rows, vocab)`` logits, changed in place, and whose they are.
Mask = Callable[[Tensor, Sequence[tuple[Row, Candidate]]], None]


class DecodeGroup:
    """Requests of one kind (:attr:`Sampling.kind`) with their history and memory, stepped together."""

    def __init__(
        self,
        head: AutoregressiveInterface,
        rows: list[Row],
        memory: DecoderMemory,
        cache: DecoderCache,
        end_ids: frozenset[int],
        mask: Mask,
    ) -> None:
        self.rows = rows
        self.cache = cache
        self.memory = MemoryRows(memory)
        self._head = head
        self._end_ids = end_ids
        self._mask = mask

    @property
    def kind(self) -> tuple[int, bool]:
        """Which requests it can take in."""
        return self.rows[0].sampling.kind

    @torch.inference_mode()
    def prefill(self, probed: Callable[[list[Row], Tensor], None]) -> None:
        """Feed the prompts, show the probed predictions, and take the first token of each request."""
        valid = [len(row.prompt) for row in self.rows]
        width = max(valid)
        padded = [row.prompt + [0] * (width - len(row.prompt)) for row in self.rows]
        tokens = to_device(padded, torch.int64, self.cache.device)
        step = self.cache.begin(width, valid)
        hidden = self._head.step(tokens, step, self.memory.view)
        self.cache.commit(step)
        asking = [(index, row.probe) for index, row in enumerate(self.rows) if row.probe is not None]
        places = [(index, count - 1) for index, count in enumerate(valid)] + asking
        row, position = to_device(list(zip(*places, strict=True)), torch.int64, hidden.device)
        logits = self._head.logits(hidden[row, position])
        if asking:
            probed([self.rows[index] for index, _ in asking], logits[len(valid) :])
        self._open(logits[: len(valid)])

    @torch.inference_mode()
    def step(self) -> None:
        """Generate one token of every hypothesis."""
        last = [candidate.last for row in self.rows for candidate in row.candidates]
        step = self.cache.begin(1)
        tokens = to_device(last, torch.int64, self.cache.device)
        hidden = self._head.step(tokens[:, None], step, self.memory.view)
        self.cache.commit(step)
        logits = self._head.logits(hidden[:, -1])
        pairs = [(row, candidate) for row in self.rows for candidate in row.candidates]
        self._mask(logits, pairs)
        if self.kind[1]:
            self._search(logits)
        else:
            self._draw(logits, pairs)

    @torch.inference_mode()
    def extend(self, other: DecodeGroup, most: int) -> None:
        """Take in the rows of a group of the same kind; raises before anything changes where memory is short.

        ``most``: rows that there can be in all, for which memory is kept at hand.
        """
        self.memory.grow(other.memory.count, most)
        self.cache.extend(other.cache)
        self.memory.extend(other.memory)
        self.rows += other.rows
        other.rows = []

    @torch.inference_mode()
    def drop(self, index: int) -> None:
        """Let a request go; the last takes its place."""
        width = self.kind[0]
        self.cache.drop(index * width, width)
        self.memory.drop(index)
        self.rows[index] = self.rows[-1]
        self.rows.pop()

    @torch.inference_mode()
    def release(self) -> None:
        """Give the history back."""
        self.cache.release()

    def _open(self, logits: Tensor) -> None:
        """The first token: one prediction a request becomes ``width`` hypotheses."""
        width, beam = self.kind
        for row in self.rows:
            row.candidates = [Candidate()]
        self._mask(logits, [(row, row.candidates[0]) for row in self.rows])
        if width > 1:
            self.cache.select([index for index in range(len(self.rows)) for _ in range(width)])
        if beam:
            for row, *found in zip(self.rows, *best_openings(logits, width, len(self._end_ids)), strict=True):
                self._grow(row, width, *found)
            return
        for row in self.rows:
            row.candidates = [Candidate() for _ in range(width)]
        pairs = [(row, candidate) for row in self.rows for candidate in row.candidates]
        self._draw(logits.repeat_interleave(width, dim=0) if width > 1 else logits, pairs)

    def _draw(self, logits: Tensor, pairs: Sequence[tuple[Row, Candidate]]) -> None:
        """Independent hypotheses: one token each; an ended one stays as it is until its request ends."""
        tokens, log_probs = choose(logits, [Draw(row.sampling, row.generator) for row, _ in pairs])
        for (row, candidate), token, log_prob in zip(pairs, tokens, log_probs, strict=True):
            if candidate.ended:
                continue
            if math.isnan(log_prob):
                row.error = _not_a_number()
                continue
            candidate.last = token
            candidate.score += log_prob
            if token in self._end_ids:
                candidate.ended = True
            else:
                candidate.tokens.append(token)
                candidate.log_probs.append(log_prob)
                candidate.ended = candidate.reached_cap = len(candidate.tokens) >= row.max_new
            if candidate.ended:
                row.ended.append(candidate)

    def _search(self, logits: Tensor) -> None:
        """Beams: every request keeps its best continuations."""
        width = self.kind[0]
        scores = [[candidate.score for candidate in row.candidates] for row in self.rows]
        found = best_continuations(logits.view(len(self.rows), width, -1), scores, len(self._end_ids))
        order: list[int] = []
        for index, (row, *best) in enumerate(zip(self.rows, *found, strict=True)):
            parents = self._grow(row, width, *best)
            order += [index * width + parent for parent in parents]
        if order != list(range(len(order))):
            self.cache.select(order)

    def _grow(
        self,
        row: Row,
        width: int,
        parents: Sequence[int],
        tokens: Sequence[int],
        totals: Sequence[float],
        log_probs: Sequence[float],
    ) -> list[int]:
        """Continue a beam: ends among the first ``width`` are kept aside, the best others go on; returns their parents.

        The request is done with ``width * patience`` ends (one at least), at its last token, or where nothing else may
        follow. The rules are those of CTranslate2's
        beam search (``src/decoding.cc``), which Whisper's reference results were made with.
        """
        if any(math.isnan(total) for total in totals[:1]):
            row.error = _not_a_number()
            return list(range(width))
        old = row.candidates
        going: list[Candidate] = []
        kept: list[int] = []
        last = len(old[0].tokens) + 1 >= row.max_new
        for rank, (parent, token, total, log_prob) in enumerate(zip(parents, tokens, totals, log_probs, strict=True)):
            ends = token in self._end_ids
            if (ends or last) and rank < width and total > -math.inf:  # what is forbidden ends nothing
                row.ended.append(_continued(old[parent], None if ends else token, total, log_prob))
                row.ended[-1].reached_cap = not ends
            elif not ends and len(going) < width:
                going.append(_continued(old[parent], token, total, log_prob))
                kept.append(parent)
        enough = len(row.ended) >= max(round(width * row.patience), 1)
        if last or enough or going[0].score == -math.inf:
            row.candidates = []
            return list(range(width))
        row.candidates = going
        return kept


def _continued(parent: Candidate, token: int | None, total: float, log_prob: float) -> Candidate:
    """A hypothesis with one more token; ``None`` ends it."""
    if token is None:
        return Candidate(list(parent.tokens), list(parent.log_probs), total, ended=True)
    return Candidate([*parent.tokens, token], [*parent.log_probs, log_prob], total, last=token)


def _not_a_number() -> FloatingPointError:
    return FloatingPointError("the decoder's logits are not numbers (NaN); the audio or the weights hold such values")
