"""A strategy on a model that is nothing but its ``ctc`` interface, and textbook searches to compare with."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from oasr_core.decoding.base import DecodeContext
from oasr_core.testing.decoding import ByteTokenizer
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy

INF = math.inf


@pytest.fixture(scope="session")
def make_strategy():
    """``make_strategy(vocab_size=5, blank_id=0, **options) -> CtcStrategy``."""

    def build(vocab_size=5, blank_id=0, **options):
        model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=blank_id, vocab_size=vocab_size)})
        return CtcStrategy(DecodeContext(model, ByteTokenizer(), CtcOptions(**options)))

    return build


@pytest.fixture(scope="session")
def textbook():
    """Frame-by-frame greedy search over a list of rows of floats: tokens, frames, log posteriors, score, silence."""

    def decode(rows, blank_id=0):
        tokens, frames, log_probs, score, last, spoken = [], [], [], 0.0, blank_id, -1
        for frame, row in enumerate(rows):
            best = max(row)
            label = row.index(best) if best != -math.inf else blank_id
            score += best if best != -math.inf else 0.0
            if label != blank_id:
                spoken = frame
                if label != last:
                    tokens.append(label)
                    frames.append(frame)
                    log_probs.append(max(row[label], rows[frame + 1][label] if frame + 1 < len(rows) else row[label]))
            last = label
        return SimpleNamespace(
            tokens=tokens, frames=frames, log_probs=log_probs, score=score, silence=len(rows) - 1 - spoken
        )

    return decode


def log_add(*values):
    top = max(values)
    return top if top == -INF else top + math.log1p(math.fsum(math.exp(v - top) for v in values) - 1.0)


def context_score(tokens, phrases):
    """Completed and pending part, by the definition: every occurrence counts; the longest open beginning is pending."""
    phrases = {tuple(phrase): boost for phrase, boost in phrases}
    phrases = {phrase: boost for phrase, boost in phrases.items() if phrase and boost}
    tokens = tuple(tokens)
    kept = sum(
        boost * len(phrase)
        for phrase, boost in phrases.items()
        for start in range(len(tokens))
        if tokens[start : start + len(phrase)] == phrase
    )
    for start in range(len(tokens)):
        rest = tokens[start:]
        open_ones = [b for phrase, b in phrases.items() if len(phrase) > len(rest) and phrase[: len(rest)] == rest]
        if open_ones:
            return kept, max(open_ones) * len(rest)
    return kept, 0.0


@dataclass
class Entry:
    """One prefix: sums and best alignments that end in blank and in a token, with both kinds of token times."""

    blank: float = -INF
    nonblank: float = -INF
    best_blank: float = -INF
    best_nonblank: float = -INF
    frames_blank: list = field(default_factory=list)
    frames_nonblank: list = field(default_factory=list)

    @property
    def total(self):
        return log_add(self.blank, self.nonblank)

    @property
    def frames(self):
        return self.frames_blank if self.best_blank > self.best_nonblank else self.frames_nonblank


@pytest.fixture(scope="session")
def prefix_beam():
    """Prefix beam search with a dictionary of prefixes, over every label: ``[(tokens, score, kept, frames)]``."""

    def decode(rows, *, blank_id=0, beam_size=10, first_beam_size=None, threshold=1.0, phrases=(), max_length=None):
        beam = {(): Entry(blank=0.0, best_blank=0.0)}
        for frame, row in enumerate(rows):
            order = sorted((label for label in range(len(row)) if row[label] > -INF), key=lambda x: (-row[x], x))
            only_blank = threshold < 1.0 and order and math.exp(row[blank_id]) >= threshold
            if only_blank or not order:
                allowed, row = [blank_id], {blank_id: row[blank_id] if order else 0.0}
            else:
                allowed = order[:first_beam_size]
            following: dict = {}
            for prefix, entry in beam.items():
                for label in allowed:
                    if label == blank_id:
                        _blank(following.setdefault(prefix, Entry()), entry, row[label])
                        continue
                    if prefix and prefix[-1] == label:
                        _repeat(following.setdefault(prefix, Entry()), entry, row[label])
                    if max_length is None or len(prefix) < max_length:
                        _grow(following.setdefault((*prefix, label), Entry()), prefix, entry, label, row[label], frame)
            ranks = {prefix: rank for rank, prefix in enumerate(beam)}

            def key(item, ranks=ranks, row=row):
                prefix, entry = item
                score = entry.total + sum(context_score(prefix, phrases))
                if prefix in ranks:
                    return (-score, 0, ranks[prefix], 0.0, 0)
                return (-score, 1, ranks[prefix[:-1]], -row[prefix[-1]], prefix[-1])

            possible = [item for item in following.items() if item[1].total > -INF]
            beam = dict(sorted(possible, key=key)[:beam_size])
        results = [
            (
                list(prefix),
                entry.total + context_score(prefix, phrases)[0],
                context_score(prefix, phrases)[0],
                entry.frames,
            )
            for prefix, entry in beam.items()
        ]
        return sorted(results, key=lambda result: -result[1])

    def _blank(new, entry, score):
        new.blank = log_add(new.blank, entry.total + score)
        new.best_blank = max(entry.best_blank, entry.best_nonblank) + score
        new.frames_blank = entry.frames

    def _repeat(new, entry, score):
        new.nonblank = log_add(new.nonblank, entry.nonblank + score)
        if entry.best_nonblank + score >= new.best_nonblank:
            new.best_nonblank, new.frames_nonblank = entry.best_nonblank + score, entry.frames_nonblank

    def _grow(new, prefix, entry, label, score, frame):
        same = bool(prefix) and prefix[-1] == label
        new.nonblank = log_add(new.nonblank, (entry.blank if same else entry.total) + score)
        best = entry.best_blank if same else max(entry.best_blank, entry.best_nonblank)
        if best + score > new.best_nonblank:
            source = entry.frames_blank if same else entry.frames
            new.best_nonblank, new.frames_nonblank = best + score, [*source, frame]

    return decode


@pytest.fixture(scope="session")
def all_alignments():
    """Every alignment of a few frames: ``{tokens: log of the summed probability}``, tokens as a tuple."""

    def enumerate_all(rows, blank_id=0):
        sums: dict = {}
        for labels in itertools.product(range(len(rows[0]) if rows else 0), repeat=len(rows)):
            score = math.fsum(row[label] for row, label in zip(rows, labels, strict=True))
            tokens = tuple(label for label, _ in itertools.groupby(labels) if label != blank_id)
            sums.setdefault(tokens, []).append(score)
        return {tokens: log_add(*scores) for tokens, scores in sums.items()}

    return enumerate_all


@pytest.fixture(scope="session")
def score_phrases():
    """``score_phrases(tokens, phrases) -> (completed, pending)``."""
    return context_score
