"""The path of least cost, and the times of tokens along it."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasr_whisper.timing import first_frames, median_filtered, token_frames


def cheapest(costs):
    """The cost of the best path from corner to corner, cell by cell."""
    rows, columns = costs.shape
    best = np.full((rows, columns), np.inf)
    for row, column in itertools.product(range(rows), range(columns)):
        before = [
            best[r, c] for r, c in ((row - 1, column - 1), (row - 1, column), (row, column - 1)) if r >= 0 and c >= 0
        ]
        best[row, column] = costs[row, column] + (min(before) if before else 0.0)
    return best[-1, -1]


def walked(costs, firsts):
    """The cost of the path that enters each row in its first column, and leaves it where the next begins."""
    total, column = 0.0, 0
    for row, first in enumerate(firsts):
        last = firsts[row + 1] if row + 1 < len(firsts) else costs.shape[1] - 1
        options = [costs[row, first : last + 1].sum()]
        if row + 1 < len(firsts) and last > first:
            options.append(costs[row, first:last].sum())
        total += min(options)
        column = last
    assert column == costs.shape[1] - 1
    return total


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 12), st.integers(0, 10**6))
def test_the_path_is_the_cheapest(rows, columns, seed):
    costs = np.random.default_rng(seed).normal(size=(rows, columns))
    firsts = first_frames(costs)
    assert len(firsts) == rows
    assert firsts[0] == 0
    assert firsts == sorted(firsts)
    assert walked(costs, firsts) == pytest.approx(cheapest(costs), abs=1e-9)


def test_tokens_follow_a_staircase():
    costs = np.ones((4, 12))
    for row, (first, last) in enumerate([(0, 3), (3, 5), (5, 11), (11, 12)]):
        costs[row, first:last] = -1.0
    assert first_frames(costs) == [0, 3, 5, 11]


def test_more_tokens_than_frames():
    assert first_frames(np.zeros((5, 2))) in ([0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1])
    assert first_frames(np.zeros((3, 1))) == [0, 0, 0]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6), st.integers(4, 20))
def test_medians_are_of_mirrored_neighbours(seed, length):
    values = torch.randn(2, 3, length, generator=torch.Generator().manual_seed(seed))
    padded = np.pad(values.numpy(), ((0, 0), (0, 0), (3, 3)), mode="reflect")
    expected = np.median(np.stack([padded[..., i : i + length] for i in range(7)]), axis=0)
    np.testing.assert_array_equal(median_filtered(values).numpy(), expected)


def test_an_axis_too_short_to_mirror_stays_as_it_is():
    values = torch.tensor([[3.0, 1.0, 2.0]])
    assert torch.equal(median_filtered(values), values)


def test_attention_on_a_staircase_gives_its_steps():
    spans = [(0, 10), (10, 24), (24, 40), (40, 50)]
    scores = torch.full((2, 6, 80), -4.0)
    scores[:, 0, 60:70] = 4.0
    for row, (first, last) in enumerate(spans):
        scores[:, 1 + row, first:last] = 4.0
    scores[:, 5, 70:] = 4.0
    frames = token_frames(scores, 1, 4, 50)
    assert frames == [0, 10, 24, 40]
    assert token_frames(scores, 1, 4, 0) == [0, 0, 0, 0]
    assert token_frames(scores, 1, 4, 2)[0] == 0


def test_constant_attention_gives_times_all_the_same():
    found = token_frames(torch.zeros(3, 6, 30), 1, 4, 20)
    assert found == sorted(found)


def test_a_window_is_aligned_in_milliseconds():
    costs = np.random.default_rng(1).normal(size=(101, 1500))
    first_frames(costs)
    best = min(_seconds(lambda: first_frames(costs)) for _ in range(5))
    assert best < 0.02, "the quarter of it is usual"


def _seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
