"""The dynamic beam, against a plain search that is written from k2's rules."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.search import FINAL_BEAM, next_beam

RULES = BeamRules(search_beam=10.0, min_active=4, max_active=9)


@pytest.mark.parametrize(
    ("beam", "active", "expected"),
    [
        (10.0, 4, 10.0),
        (20.0, 9, 18.0),
        (5.0, 6, 6.0),
        (10.0, 3, 12.5),
        (5.0, 1, 12.5),
        (30.0, 3, 37.5),
        (30.0, 0, 26.0),
        (10.0, 10, 8.0),
        (20.0, 10, 8.0),
        (5.0, 99, 4.0),
    ],
)
def test_rules_of_a_frame_in_the_middle(beam, active, expected):
    for total in (-1, 100):
        assert next_beam(beam, active, 50, total, RULES) == pytest.approx(expected)


def test_the_last_frames_do_not_narrow_and_want_half_of_max_active():
    assert next_beam(10.0, 10, 95, 100, RULES) == 8.0
    assert next_beam(10.0, 10, 96, 100, RULES) == 10.0
    assert next_beam(10.0, 10, 96, -1, RULES) == 8.0
    # Half of an odd number is not rounded: 4 of 4.5 are too few.
    assert next_beam(10.0, 4, 95, 100, RULES) == 10.0
    assert next_beam(10.0, 4, 96, 100, RULES) == 12.5
    assert next_beam(10.0, 5, 96, 100, RULES) == 10.0


def test_the_step_behind_the_last_frame_prunes_nothing():
    assert next_beam(3.0, 5, 100, 100, RULES) == FINAL_BEAM
    assert next_beam(3.0, 0, 0, 0, RULES) == FINAL_BEAM


def test_an_infinite_beam_stays_infinite():
    rules = BeamRules(math.inf, 2, 4)
    for active in (0, 1, 3, 99):
        assert next_beam(math.inf, active, 3, 9, rules) == math.inf


@pytest.mark.parametrize("block", range(8))
def test_beam_and_active_states_of_every_frame_on_random_graphs(block, random_graph, random_rows, plain_search):
    """200 graphs in 8 blocks: epsilons, self-loops, dead ends, finals out of reach."""
    kinds = set()
    for seed in range(25 * block, 25 * (block + 1)):
        rng = np.random.default_rng(seed)
        labels = int(rng.integers(2, 6))
        states = int(rng.integers(3, 24))
        epsilons = {"epsilons": seed % 3 > 0, "acyclic_epsilons": seed % 3 > 1}
        graph = random_graph(rng, states, labels, finals=seed % 5 > 0, **epsilons)
        rows = random_rows(rng, int(rng.integers(0, 14)), labels)
        rules = BeamRules(float(rng.uniform(0.5, 6.0)), int(rng.integers(0, 4)), int(rng.integers(4, 9)))
        online, allow_partial = bool(rng.integers(2)), bool(rng.integers(2))
        expected = plain_search(
            graph,
            rows,
            search_beam=rules.search_beam,
            min_active=rules.min_active,
            max_active=rules.max_active,
            online=online,
            allow_partial=allow_partial,
        )
        decoder = Decoder(graph, rules, allow_partial=allow_partial)
        channel, traces = decoder.open(), []
        decoder.advance([channel], [rows], whole=not online, traces=traces)
        np.testing.assert_array_equal(traces[0], np.array(expected.trace).reshape(-1, 2), err_msg=f"seed {seed}")
        path = decoder.final(channel)
        if expected.score is None:
            assert path is None, seed
            kinds.add("none")
            continue
        assert path.score == pytest.approx(expected.score, abs=1e-9), seed
        assert (path.words, path.frames) == (expected.words, expected.frames), seed
        assert path.reached_final == expected.reached_final, seed
        kinds.add("final" if path.reached_final else "partial")
    assert kinds == {"none", "final", "partial"}
