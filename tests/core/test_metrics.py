"""Error counts against a plain alignment, normalisation, the bootstrap and percentiles."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oasr_core.metrics import (
    ErrorCounts,
    bootstrap_interval,
    count_errors,
    normalise_text,
    percentiles,
    text_units,
)


def alignment(ref: str, hyp: str) -> ErrorCounts:
    """Every cell keeps its fewest errors, then its fewest gaps, with the counts that make them."""
    best = {(0, 0): (0, 0, 0, 0)}  # errors, gaps, deletions, insertions
    for i in range(len(ref) + 1):
        for j in range(len(hyp) + 1):
            ways = []
            if i and j:
                e, g, d, n = best[i - 1, j - 1]
                ways.append((e + (ref[i - 1] != hyp[j - 1]), g, d, n))
            if i:
                e, g, d, n = best[i - 1, j]
                ways.append((e + 1, g + 1, d + 1, n))
            if j:
                e, g, d, n = best[i, j - 1]
                ways.append((e + 1, g + 1, d, n + 1))
            if ways:
                best[i, j] = min(ways)
    errors, gaps, deletions, insertions = best[len(ref), len(hyp)]
    return ErrorCounts(errors - gaps, deletions, insertions, len(ref))


@given(st.text("abc", max_size=9), st.text("abc", max_size=9))
def test_counts_equal_a_plain_alignment(ref: str, hyp: str):
    assert count_errors(ref, hyp) == alignment(ref, hyp)


@pytest.mark.parametrize(
    ("ref", "hyp", "counts"),
    [
        ("one two three", "one two three", (0, 0, 0)),
        ("one two three", "one too three", (1, 0, 0)),
        ("one two three", "one three", (0, 1, 0)),
        ("one two three", "one two two three", (0, 0, 1)),
        ("one two three", "", (0, 3, 0)),
        ("", "one two", (0, 0, 2)),
        ("one two", "two three", (2, 0, 0)),  # or one deletion and one insertion
        ("one two three four", "two three four five", (0, 1, 1)),
        ("", "", (0, 0, 0)),
    ],
)
def test_counts_of_words(ref: str, hyp: str, counts: tuple[int, int, int]):
    got = count_errors(text_units(ref, "wer"), text_units(hyp, "wer"))
    assert (got.substitutions, got.deletions, got.insertions) == counts
    assert got.reference == len(ref.split())


def test_long_texts_take_no_quadratic_memory_and_little_time():
    ref = [str(i % 97) for i in range(3000)]
    assert count_errors(ref, [*ref[:1000], "x", *ref[1001:]]) == ErrorCounts(1, 0, 0, 3000)


def test_counts_add_up_and_give_a_rate():
    total = sum([ErrorCounts(1, 2, 3, 10), ErrorCounts(0, 1, 0, 4)], ErrorCounts())
    assert total == ErrorCounts(1, 3, 3, 14)
    assert (total.errors, total.rate) == (7, 0.5)
    assert ErrorCounts(insertions=1).rate is None


def test_characters_are_counted_without_whitespace():
    assert text_units(" 今日 は\n晴", "cer") == ["今", "日", "は", "晴"]


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  Hello,   WORLD!\n", "hello world"),
        ("Don't, rock’n’roll", "dont rocknroll"),
        ("well-known (so-called) A.B.", "well known so called a b"),
        ("STRASSE straße", "strasse strasse"),
        ("ＡＢＣ１２", "abc12"),
        ("cafe\u0301 CAFÉ", "café café"),
        ("今天，天气。", "今天 天气"),
        ("5 € + 3 %", "5 € + 3"),
        ("¿Qué?", "qué"),
        ("... ' !", ""),
        ("e'\u0301", "é"),
        ("", ""),
    ],
)
def test_normalised_text(text: str, normal: str):
    assert normalise_text(text) == normal
    assert normalise_text(normal) == normal


@given(st.text())
def test_normalisation_is_idempotent(text: str):
    assert normalise_text(normalise_text(text)) == normalise_text(text)


def test_bootstrap_is_deterministic_and_brackets_the_rate():
    random = np.random.default_rng(1)
    references = random.integers(1, 20, size=200)
    errors = random.binomial(references, 0.1)
    low, high = bootstrap_interval(errors.tolist(), references.tolist())
    assert (low, high) == bootstrap_interval(errors.tolist(), references.tolist())
    rate = errors.sum() / references.sum()
    assert low < rate < high
    # the normal approximation of a binomial proportion, which these errors are
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.1 * 0.9 / references.sum()), rel=0.2)
    narrow = bootstrap_interval(errors.tolist(), references.tolist(), confidence=0.5)
    assert low < narrow[0] < narrow[1] < high
    assert bootstrap_interval(errors.tolist(), references.tolist(), seed=1) != (low, high)


def test_bootstrap_of_little():
    assert bootstrap_interval([0, 0], [5, 5]) == (0.0, 0.0)
    assert bootstrap_interval([2], [4]) == (0.5, 0.5)
    assert bootstrap_interval([1], [0]) is None
    assert bootstrap_interval([], []) is None
    low, high = bootstrap_interval([1, 1], [0, 2])  # resamples of the first alone have no rate
    assert 0.5 <= low <= high


@pytest.mark.parametrize(
    "bad",
    [{"errors": [1]}, {"confidence": 1.0}, {"confidence": 0.0}, {"resamples": 0}],
    ids=lambda bad: next(iter(bad)),
)
def test_bootstrap_refuses_nonsense(bad: dict[str, object]):
    with pytest.raises(ValueError, match="expected as many errors as references"):
        bootstrap_interval(**{"errors": [1, 1], "references": [2, 2], **bad})


def test_percentiles():
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles(range(101)) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([1.0, 2.0], [25]) == {"p25": 1.25}


def test_torch_is_not_imported():
    code = "import sys, oasr_core.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
