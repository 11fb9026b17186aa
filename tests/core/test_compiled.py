"""Compiling takes its time and says so, once; machine code that is there is used in silence."""

from __future__ import annotations

import logging

import numba

from oasr_core.compiled import compilation_announced


def test_compilation_is_announced_once(caplog):
    @numba.njit  # without a cache, so that every run of the test compiles
    def twice(number):
        return 2 * number

    @numba.njit  # without a cache, so that every run of the test compiles
    def thrice(number):
        return 3 * number

    with caplog.at_level(logging.WARNING), compilation_announced("the CTC search", seconds=15):
        assert (twice(2), thrice(2)) == (4, 6)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling the CTC search (once on this machine, about 15 s)"
    ]
    caplog.clear()
    with compilation_announced("the CTC search", seconds=15):
        assert (twice(3), thrice(3)) == (6, 9)
    assert not caplog.records
