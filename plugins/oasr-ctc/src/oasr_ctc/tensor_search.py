"""CTC prefix beam search in tensor operations, for accelerators: the results of ``prefix_search``, one step a frame.

Sums are in double precision, so scores agree with the compiled search up to the last digits of the logarithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oasr_core.decoding.context import ContextGraph
from oasr_ctc.beams import PREFIX
from oasr_ctc.limits import Limits
from oasr_ctc.pool import BeamPool
from oasr_ctc.prefix_search import HASH_FIRST, HASH_SECOND, Longs

_INF = float("inf")
_FIELDS = PREFIX.names or ()
_SCORES = ("blank", "nonblank", "best_blank", "best_nonblank")
_ABSENT = ("length", "last", "emission_blank", "emission_nonblank")
_DOUBLES = frozenset(name for name in _FIELDS if PREFIX[name].kind == "f")

#: A beam as tensors ``(batch, beam)``, by the names of the fields of ``PREFIX``.
Beam = dict[str, Tensor]


class _Labels(NamedTuple):
    """What may be appended in each frame: ``tokens`` and ``scores`` ``(batch, frames, n)``, best first.

    ``scores`` are log posteriors, -inf where a place is empty; ``allowed`` ``(batch, frames, vocab)`` says which labels
    are considered at all, None: all.
    """

    tokens: Tensor
    scores: Tensor
    allowed: Tensor | None


class _Emissions(NamedTuple):
    """What the frames of a chunk emitted, ``(batch, frames, beam)``; ``parent`` is -2 where nothing was."""

    parent: Tensor
    token: Tensor


def first_invalid(log_probs: Tensor, lengths: Tensor) -> Tensor:
    """``(batch,)`` the first frame of each row that holds NaN or +inf, -1 where none does."""
    frames = torch.arange(log_probs.shape[1], device=log_probs.device)
    broken = (log_probs.isnan() | (log_probs == _INF)).any(dim=2) & (frames < lengths[:, None])
    if not len(frames):
        return torch.full_like(lengths, -1)
    return torch.where(broken.any(dim=1), broken.int().argmax(dim=1), -1)


def advance_tensors(
    pool: BeamPool, graph: ContextGraph, rows: Longs, slots: Longs, log_probs: Tensor, lengths: Tensor, limits: Limits
) -> None:
    """Advance the streams ``slots`` by their ``rows`` of ``log_probs``; one copy to the device and one back."""
    device = log_probs.device
    index = torch.from_numpy(rows).to(device)
    log_probs, lengths = log_probs[index], lengths.to(device)[index]
    batch, frames, _ = log_probs.shape
    beam_size = pool.beams.shape[1]
    if pool.used + batch * frames * beam_size > len(pool.emissions):
        pool.make_room(batch * frames * beam_size)
    beam, begun = _upload(pool, slots, device), torch.from_numpy(pool.frames[slots]).to(device)
    automaton = _Automaton(graph, device)
    labels = _find_labels(log_probs, limits, automaton)
    none, skipped = _blank_frames(log_probs, limits)
    parents = torch.full((batch, frames, beam_size), -2, dtype=torch.int64, device=device)
    emitted = _Emissions(parents, torch.zeros_like(parents))
    places = torch.arange(batch * frames * beam_size, device=device).view(batch, frames, beam_size) + pool.used
    carried = log_probs[:, :1].double().gather(2, beam["last"].clamp(min=0)[:, None])[:, 0] if frames else beam["blank"]
    for t in range(frames):
        posteriors, here = log_probs[:, t].double(), t < lengths
        here_labels = _Labels(
            labels.tokens[:, t], labels.scores[:, t], None if labels.allowed is None else labels.allowed[:, t]
        )
        advanced, parent, token = _advance(beam, begun + t, posteriors, here_labels, limits, automaton, places[:, t])
        stuck = none[:, t] | (advanced["length"] < 0).all(dim=1)
        blank_score = torch.where(
            skipped[:, t] & (posteriors[:, limits.blank] > -_INF), posteriors[:, limits.blank], 0.0
        )
        collapsed = _collapse(beam, begun + t, blank_score)
        speaks = (here & ~stuck & ~skipped[:, t])[:, None]
        emitted.parent[:, t] = torch.where(speaks, parent, -2)
        emitted.token[:, t] = torch.where(speaks, token, 0)
        beam = {
            name: torch.where(speaks, advanced[name], torch.where(here[:, None], collapsed[name], beam[name]))
            for name in _FIELDS
        }
    _download(pool, slots, beam, emitted, _token_scores(log_probs, lengths, emitted.token), carried, lengths)


def _upload(pool: BeamPool, slots: Longs, device: torch.device) -> Beam:
    """The streams' beams; places without a prefix are impossible ones."""
    records = pool.beams[slots]
    unused = np.arange(records.shape[1]) >= pool.sizes[slots, None]
    for names, value in ((_SCORES, -_INF), (_ABSENT, -1), (("state", "kept", "pending"), 0)):
        for name in names:
            records[name][unused] = value
    matrix = torch.from_numpy(records.view(np.int64).reshape(*records.shape, len(_FIELDS))).to(device)
    return {
        name: matrix[..., i].contiguous().view(torch.float64) if name in _DOUBLES else matrix[..., i]
        for i, name in enumerate(_FIELDS)
    }


def _download(
    pool: BeamPool, slots: Longs, beam: Beam, emitted: _Emissions, scores: Tensor, carried: Tensor, lengths: Tensor
) -> None:
    """Write the beams and what they emitted to the pool."""
    batch, frames, beam_size = emitted.parent.shape
    matrix = torch.stack([beam[name].contiguous().view(torch.int64) for name in _FIELDS], dim=2)
    parts = (matrix, emitted.parent, emitted.token, scores.view(torch.int64), carried.view(torch.int64), lengths)
    packed = torch.cat([part.flatten() for part in parts]).cpu().numpy()
    cuts = np.cumsum([part.numel() for part in parts])[:-1]
    flat, parent, token, token_scores, first_scores, counts = np.split(packed, cuts)
    counts = counts.astype(np.int64)
    # Tokens that the last frame of the chunk before emitted take the larger posterior of that frame and the first one.
    first = first_scores.view(np.float64).reshape(batch, beam_size)
    for row, slot in enumerate(slots):
        for j in range(pool.sizes[slot] if counts[row] else 0):
            place = pool.beams[slot, j]["emission_nonblank"]
            if place >= 0 and pool.emissions[place]["frame"] == pool.frames[slot] - 1:
                pool.emissions[place]["log_prob"] = max(pool.emissions[place]["log_prob"], first[row, j])
    records = flat.reshape(batch, beam_size, len(_FIELDS)).copy().view(PREFIX)[..., 0]
    fresh = pool.emissions[pool.used : pool.used + len(parent)]
    fresh["parent"] = np.maximum(parent, -1)
    fresh["token"] = token
    fresh["log_prob"] = token_scores.view(np.float64)
    grid = pool.frames[slots, None] + np.arange(frames)
    fresh["frame"] = np.repeat(grid.flatten(), beam_size)
    pool.used += len(parent)
    pool.beams[slots] = records
    pool.sizes[slots] = (np.maximum(records["blank"], records["nonblank"]) > -_INF).sum(axis=1)
    pool.frames[slots] += counts


def _token_scores(log_probs: Tensor, lengths: Tensor, tokens: Tensor) -> Tensor:
    """For tokens ``(batch, frames, beam)`` the larger of their log posteriors in their frame and in the next."""
    own = log_probs.gather(2, tokens).double()
    if log_probs.shape[1] < 2:
        return own
    later = torch.arange(1, log_probs.shape[1], device=log_probs.device) < lengths[:, None]
    following = torch.where(later[..., None], log_probs[:, 1:].gather(2, tokens[:, :-1]).double(), -_INF)
    own[:, :-1] = torch.maximum(own[:, :-1], following)
    return own


def _blank_frames(log_probs: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Which frames have no posterior at all, and which are so surely blank that nothing else is considered."""
    none = (log_probs == -_INF).all(dim=2)
    return none, ~none & (log_probs[..., limits.blank].double() >= limits.threshold)


def _find_labels(log_probs: Tensor, limits: Limits, automaton: _Automaton) -> _Labels:
    """The best labels of every frame and, where all are considered, those that may continue a phrase."""
    keys = _order_keys(log_probs)
    best, order = keys.topk(limits.width, dim=2)
    allowed = None
    if limits.only_labels:
        allowed = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(2, order, True)
    elif len(automaton.tokens):
        extra = keys[..., automaton.tokens]
        twice = (extra[..., None] == best[..., None, :]).any(dim=3)
        joined = torch.cat([best, torch.where(twice, torch.iinfo(torch.int64).min, extra)], dim=2)
        best, _ = joined.sort(dim=2, descending=True)
    used = best != torch.iinfo(torch.int64).min
    tokens = torch.where(used, 0xFFFFFFFF - (best & 0xFFFFFFFF), limits.blank)
    scores = torch.where(tokens == limits.blank, -_INF, log_probs.gather(2, tokens).double())
    return _Labels(tokens, scores, allowed)


def _order_keys(log_probs: Tensor) -> Tensor:
    """Integers that order labels by log posterior and then by falling id."""
    bits = log_probs.contiguous().view(torch.int32).to(torch.int64)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(log_probs.shape[2], device=log_probs.device)
    return (keys << 32) | (0xFFFFFFFF - ids)


def _collapse(beam: Beam, frame: Tensor, blank_score: Tensor) -> Beam:
    """A frame of blank alone."""
    blank_first = beam["best_blank"] > beam["best_nonblank"]
    nothing = torch.full_like(beam["blank"], -_INF)
    return {
        **beam,
        "blank": torch.logaddexp(beam["blank"], beam["nonblank"]) + blank_score[:, None],
        "nonblank": nothing,
        "best_blank": torch.maximum(beam["best_blank"], beam["best_nonblank"]) + blank_score[:, None],
        "best_nonblank": nothing,
        "emission_blank": torch.where(blank_first, beam["emission_blank"], beam["emission_nonblank"]),
        "emission_nonblank": torch.full_like(beam["last"], -1),
        "spoken": torch.where(blank_first, beam["spoken"], frame[:, None] - 1),
    }


def _advance(
    beam: Beam,
    frame: Tensor,
    posteriors: Tensor,
    labels: _Labels,
    limits: Limits,
    automaton: _Automaton,
    places: Tensor,
) -> tuple[Beam, Tensor, Tensor]:
    """One frame: the new beam, and of each of its prefixes the parent (-2: none) and the token of what it emitted."""
    blank_score, last_score = _stay_scores(beam, posteriors, labels, limits)
    total = torch.logaddexp(beam["blank"], beam["nonblank"])
    same = beam["last"][:, :, None] == beam["last"][:, None, :]
    # [b, i, j]: prefix j is prefix i and one token more.
    child = (beam["hash"][:, :, None] == beam["parent_hash"][:, None, :]) & (
        beam["length"][:, :, None] + 1 == beam["length"][:, None, :]
    )
    child &= ((beam["length"] >= 0)[:, :, None]) & ((beam["length"] > 0)[:, None, :])
    source = torch.where(same, beam["blank"][:, :, None], total[:, :, None])
    grown = torch.where(child, source, -_INF).amax(dim=1) + last_score
    stay_blank = total + blank_score
    stay_nonblank = torch.logaddexp(beam["nonblank"] + last_score, grown)
    stay = torch.logaddexp(stay_blank, stay_nonblank) + beam["kept"] + beam["pending"]

    tokens, token_scores = labels.tokens[:, None, :], labels.scores[:, None, :]
    state = automaton.follow(beam["state"][:, :, None].expand(-1, -1, tokens.shape[2]), tokens)
    repeated = beam["last"][:, :, None] == tokens
    appended = torch.where(repeated, beam["blank"][:, :, None], total[:, :, None]) + token_scores
    score = appended + beam["kept"][:, :, None] + automaton.reward[state] + automaton.pending[state]
    known = (child[:, :, :, None] & (beam["last"][:, None, :, None] == tokens[:, :, None, :])).any(dim=2)
    closed = (beam["length"] >= limits.max_length) | (beam["length"] < 0)
    score = torch.where(known | closed[:, :, None], -_INF, score)

    width, count = stay.shape[1], tokens.shape[2]
    best, chosen = torch.cat([stay, score.flatten(1)], dim=1).sort(dim=1, descending=True, stable=True)
    best, chosen = best[:, :width], chosen[:, :width]
    stays, flat = chosen < width, (chosen - width).clamp(min=0)
    origin = torch.where(stays, chosen, flat // count)

    def at(values: Tensor) -> Tensor:
        return values.gather(1, origin)

    def picked(values: Tensor) -> Tensor:
        return values.expand(-1, width, -1).flatten(1).gather(1, flat)

    token = torch.where(stays, at(beam["last"]), picked(tokens))
    kept_on = _stay_alignment(beam, frame, blank_score, last_score, child, at)
    is_same = token == at(beam["last"])
    begin_blank = is_same | (at(beam["best_blank"]) > at(beam["best_nonblank"]))
    new_best = torch.where(begin_blank, at(beam["best_blank"]), at(beam["best_nonblank"])) + picked(token_scores)
    new_parent = torch.where(begin_blank, at(beam["emission_blank"]), at(beam["emission_nonblank"]))
    parent = torch.where(stays, kept_on["parent"], new_parent)
    dead = best == -_INF
    parent = torch.where(dead, -2, parent)
    emission = torch.where(parent == -2, kept_on["emission_nonblank"], places)
    new_state = picked(state)
    mixed = (at(beam["hash"]) + token + 1) * HASH_FIRST
    mixed = (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)) * HASH_SECOND
    nothing = torch.full_like(new_best, -_INF)
    result = {
        "hash": torch.where(stays, at(beam["hash"]), mixed),
        "parent_hash": torch.where(stays, at(beam["parent_hash"]), at(beam["hash"])),
        "last": token,
        "length": at(beam["length"]) + (~stays).long(),
        "emission_blank": torch.where(stays, kept_on["emission_blank"], -1),
        "emission_nonblank": emission,
        "spoken": torch.where(stays, kept_on["spoken"], -1),
        "state": torch.where(stays, at(beam["state"]), new_state),
        "blank": torch.where(stays, at(stay_blank), nothing),
        "nonblank": torch.where(stays, at(stay_nonblank), picked(appended)),
        "best_blank": torch.where(stays, kept_on["best_blank"], nothing),
        "best_nonblank": torch.where(stays, kept_on["best_nonblank"], new_best),
        "kept": at(beam["kept"]) + torch.where(stays, 0.0, automaton.reward[new_state]),
        "pending": torch.where(stays, at(beam["pending"]), automaton.pending[new_state]),
    }
    return _without(result, dead), parent, torch.where(parent == -2, 0, token)


def _stay_scores(beam: Beam, posteriors: Tensor, labels: _Labels, limits: Limits) -> tuple[Tensor, Tensor]:
    """Log posteriors of blank ``(batch, 1)`` and of each prefix's last token, -inf where they are not considered."""
    last = beam["last"].clamp(min=0)
    if labels.allowed is not None:
        posteriors = torch.where(labels.allowed, posteriors, -_INF)
    last_score = torch.where(beam["length"] > 0, posteriors.gather(1, last), -_INF)
    return posteriors[:, limits.blank, None], last_score


def _stay_alignment(
    beam: Beam, frame: Tensor, blank_score: Tensor, last_score: Tensor, child: Tensor, at: Callable[[Tensor], Tensor]
) -> Beam:
    """Best alignments of prefixes to which nothing is appended; ``parent`` is -2 where the old emission stays."""
    blank_first = beam["best_blank"] > beam["best_nonblank"]
    best_blank = torch.maximum(beam["best_blank"], beam["best_nonblank"]) + blank_score
    emission_blank = torch.where(blank_first, beam["emission_blank"], beam["emission_nonblank"])
    best_nonblank = beam["best_nonblank"] + last_score
    origin = child.int().argmax(dim=1)
    begin_blank = (beam["last"].gather(1, origin) == beam["last"]) | blank_first.gather(1, origin)
    source = torch.where(begin_blank, beam["best_blank"].gather(1, origin), beam["best_nonblank"].gather(1, origin))
    parent = torch.where(
        begin_blank, beam["emission_blank"].gather(1, origin), beam["emission_nonblank"].gather(1, origin)
    )
    better = child.any(dim=1) & (source + last_score > best_nonblank)
    best_nonblank = torch.where(better, source + last_score, best_nonblank)
    result = {
        "best_blank": best_blank,
        "emission_blank": torch.where(best_blank == -_INF, -1, emission_blank),
        "spoken": torch.where(blank_first, beam["spoken"], frame[:, None] - 1),
        "best_nonblank": best_nonblank,
        "emission_nonblank": torch.where(best_nonblank == -_INF, -1, beam["emission_nonblank"]),
        "parent": torch.where(better, parent, -2),
    }
    return {name: at(values) for name, values in result.items()}


def _without(beam: Beam, dead: Tensor) -> Beam:
    """Make the prefixes ``dead`` impossible ones."""
    empty = {**dict.fromkeys(_ABSENT, -1), **dict.fromkeys(_SCORES, -_INF), "state": 0, "kept": 0.0, "pending": 0.0}
    return {name: torch.where(dead, empty[name], values) if name in empty else values for name, values in beam.items()}


class _Automaton:
    """A context graph on the device."""

    def __init__(self, graph: ContextGraph, device: torch.device) -> None:
        arrays = graph.arrays
        states = np.repeat(np.arange(len(graph)), np.diff(arrays.arc_begin))
        keys = (states.astype(np.int64) << 32) | arrays.arc_token
        self._keys = torch.from_numpy(keys).to(device)
        self._targets = torch.from_numpy(arrays.arc_target).long().to(device)
        self._fail = torch.from_numpy(arrays.fail).long().to(device)
        self._links = _longest_chain(arrays.fail)
        self.tokens = torch.from_numpy(np.unique(arrays.arc_token)).long().to(device)
        self.pending = torch.from_numpy(arrays.pending).to(device)
        self.reward = torch.from_numpy(arrays.reward).to(device)

    def follow(self, state: Tensor, token: Tensor) -> Tensor:
        """The states behind ``token``, of the shape of ``state``."""
        result = torch.zeros_like(state)
        if not len(self._keys):
            return result
        searching = torch.ones_like(state, dtype=torch.bool)
        for _ in range(self._links):
            wanted = (state << 32) | token
            place = torch.searchsorted(self._keys, wanted).clamp(max=len(self._keys) - 1)
            found = searching & (self._keys[place] == wanted)
            result = torch.where(found, self._targets[place], result)
            state = self._fail[state]
            searching &= ~found & (state >= 0)
            state = state.clamp(min=0)
        return result


def _longest_chain(fail: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    longest = 0
    for state in range(len(fail)):
        links = 0
        while state >= 0:
            state, links = int(fail[state]), links + 1
        longest = max(longest, links)
    return longest
