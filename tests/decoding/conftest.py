"""Scores of phrases by their definition, without an automaton."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def by_definition():
    """``by_definition(tokens, phrases) -> (completed, pending)``: every occurrence; the longest open beginning."""

    def score(tokens, phrases):
        boosts = {tuple(phrase): boost for phrase, boost in phrases}
        boosts = {phrase: boost for phrase, boost in boosts.items() if phrase and boost}
        tokens = tuple(tokens)
        completed = sum(
            boost * len(phrase)
            for phrase, boost in boosts.items()
            for start in range(len(tokens))
            if tokens[start : start + len(phrase)] == phrase
        )
        for start in range(len(tokens)):
            rest = tokens[start:]
            open_ones = [b for phrase, b in boosts.items() if len(phrase) > len(rest) and phrase[: len(rest)] == rest]
            if open_ones:
                return completed, max(open_ones) * len(rest)
        return completed, 0.0

    return score
