"""The nearest known name in a message."""

from __future__ import annotations

import pytest

from oasr_core.errors import did_you_mean

OPTIONS = ["search", "blank_id", "beam_size", "blank_threshold", "hotwords"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("beamsize", "beam_size"),
        ("beem", "beam_size"),
        ("beam", "beam_size"),
        ("blanc", "blank_id"),
        ("serch", "search"),
    ],
)
def test_the_nearest_name_or_the_one_whose_first_part_is_near(name, nearest):
    assert did_you_mean(name, OPTIONS) == f" Did you mean {nearest!r}?"


@pytest.mark.parametrize("name", ["number", "xyz", ""])
def test_nothing_near(name):
    assert did_you_mean(name, OPTIONS) == ""


def test_no_names():
    assert did_you_mean("beam", []) == ""
