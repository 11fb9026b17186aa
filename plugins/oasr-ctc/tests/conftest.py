"""A strategy on a model that is nothing but its ``ctc`` interface, and the textbook greedy search to compare with."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from oasr_core.decoding.base import DecodeContext
from oasr_core.testing.decoding import ByteTokenizer
from oasr_ctc.options import CtcOptions
from oasr_ctc.strategy import CtcStrategy


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
