"""The search, against the reference decoders of the digit graphs and against a plain search."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs

EXACT = BeamRules(math.inf)
GRAPHS = ("G_2_gram", "G_4digits")


def decode(decoder, rows, *, whole=True):
    channel = decoder.open()
    decoder.advance([channel], [rows], whole=whole)
    return decoder.final(channel)


@pytest.mark.parametrize("name", GRAPHS)
def test_infinite_beam_gives_words_and_cost_of_the_reference(name, digit_graphs, digit_log_probs, digit_oracle):
    graph = digit_graphs[name]
    decoder = Decoder(graph, EXACT)
    for utterance, expected in digit_oracle[name].items():
        path = decode(decoder, digit_log_probs[utterance])
        words = [graph.symbols[word] for word in path.words]
        assert words == expected["exact_viterbi_k2_graph"]["words"] == expected["beam_inf"]["words"]
        assert -path.score == pytest.approx(expected["beam_inf"]["cost"], abs=1e-2)
        assert path.reached_final


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("beam", [8.0, 16.0, 20.0])
def test_finite_beam_is_never_better_and_equal_where_any_beam_is(
    name, beam, digit_graphs, digit_log_probs, digit_oracle
):
    decoder = Decoder(digit_graphs[name], BeamRules(beam), allow_partial=False)
    for utterance, expected in digit_oracle[name].items():
        exact = expected["beam_inf"]["cost"]
        path = decode(decoder, digit_log_probs[utterance])
        stored = [expected[key] for key in ("beam_8", "beam_16", "simple_beam_8", "simple_beam_16")]
        easy = all(each["reached_final"] and abs(each["cost"] - exact) < 1e-2 for each in stored)
        if easy:
            assert path is not None, utterance
            assert -path.score == pytest.approx(exact, abs=1e-2)
        if path is not None:
            assert -path.score >= exact - 1e-2


def test_four_digits_or_nothing(digit_graphs, digit_log_probs):
    graph = digit_graphs["G_4digits"]
    for beam in (0.5, 2.0, 8.0, 20.0):
        decoder = Decoder(graph, BeamRules(beam, 0, 50), allow_partial=False)
        for rows in digit_log_probs.values():
            for frames in (len(rows), len(rows) // 2, 3):
                path = decode(decoder, rows[:frames])
                if path is None:
                    continue
                assert path.reached_final
                assert len(path.words) == 4


def test_a_path_that_ends_too_early_is_partial_or_refused(digit_graphs, digit_log_probs):
    graph = digit_graphs["G_4digits"]
    rows = digit_log_probs["digits_05"][:30]
    rules = BeamRules(2.0, 0, 50)
    assert decode(Decoder(graph, rules, allow_partial=False), rows, whole=False) is None
    path = decode(Decoder(graph, rules, allow_partial=True), rows, whole=False)
    assert not path.reached_final
    assert [graph.symbols[word] for word in path.words] == ["THREE", "EIGHT"]


def test_final_paths_win_over_better_ones_that_are_not(random_rows):
    """The arc out of state 1 is better, but only state 2 is final."""
    arcs = [(0, 1, 1, 0.0, [1]), (0, 2, 1, -3.0, [2]), (1, 1, 1, 0.0, []), (2, 3, FINAL, -1.0, [])]
    rows = random_rows(np.random.default_rng(0), 1, 2)
    for allow_partial in (True, False):
        path = decode(Decoder(graph_from_arcs(arcs, 4), allow_partial=allow_partial), rows)
        assert path.words == [2]
        assert path.score == pytest.approx(-4.0 + float(rows[0, 1]))
        assert path.reached_final


def test_without_a_final_state_the_best_arc_ends_the_path(random_rows):
    arcs = [
        (0, 1, 1, 0.0, [1]),
        (0, 2, 1, -1.0, [2]),
        (1, 1, 0, -5.0, [3]),
        (2, 2, 0, -0.5, [4]),
        (3, 4, FINAL, 0.0, []),
    ]
    rows = random_rows(np.random.default_rng(0), 1, 2)
    graph = graph_from_arcs(arcs, 5)
    path = decode(Decoder(graph, allow_partial=True), rows)
    assert path.words == [2]
    assert path.score == pytest.approx(-1.5 + float(rows[0, 1]))
    assert not path.reached_final
    assert decode(Decoder(graph, allow_partial=False), rows) is None


def test_a_graph_that_ends_before_the_audio(random_rows):
    graph = graph_from_arcs([(0, 1, 1, 0.0, [1]), (1, 2, FINAL, 0.0, [])], 3)
    rows = random_rows(np.random.default_rng(0), 5, 2)
    assert decode(Decoder(graph, allow_partial=False), rows) is None
    path = decode(Decoder(graph, allow_partial=True), rows)
    assert (path.words, path.frames, path.reached_final) == ([1], [0], False)
    assert path.silent_frames == 4


def test_no_frames(random_rows):
    rows = np.empty((0, 3), np.float32)
    accepting = graph_from_arcs([(0, 1, EPSILON, -1.0, [5]), (1, 2, FINAL, -2.0, [6])], 3)
    path = decode(Decoder(accepting), rows)
    assert (path.words, path.frames, path.score, path.reached_final) == ([5, 6], [0, 0], -3.0, True)
    refusing = graph_from_arcs([(0, 1, 1, 0.0, [1]), (1, 2, FINAL, 0.0, [])], 3)
    assert decode(Decoder(refusing, allow_partial=False), rows) is None


def test_impossible_frames_end_every_path():
    graph = graph_from_arcs([(0, 0, 0, 0.0, []), (0, 1, 1, 0.0, [1]), (1, 1, 0, 0.0, []), (1, 2, FINAL, 0.0, [])], 3)
    rows = np.full((3, 2), -np.inf, np.float32)
    rows[0, 1] = 0.0
    assert decode(Decoder(graph, allow_partial=False), rows) is None
    assert decode(Decoder(graph, allow_partial=True), rows).words == [1]


def test_frames_and_ends_of_words():
    arcs = [
        (0, 0, 0, 0.0, []),
        (0, 1, 1, 0.0, [7]),
        (1, 1, 1, 0.0, []),
        (1, 2, 2, 0.0, []),
        (2, 2, 0, 0.0, []),
        (2, 0, EPSILON, 0.0, [8]),
        (2, 3, FINAL, 0.0, []),
        (0, 3, FINAL, 0.0, []),
    ]
    labels = [0, 1, 1, 2, 0, 0, 1, 2, 0]
    rows = np.full((len(labels), 3), -50.0, np.float32)
    rows[np.arange(len(labels)), labels] = 0.0
    path = decode(Decoder(graph_from_arcs(arcs, 4), EXACT), rows)
    assert path.words[:3] == [7, 8, 7]
    assert path.frames[0] == 1
    assert path.end_frames[0] == 4
    assert path.frames[2] == 6
    assert path.end_frames[2] == 8
    assert path.silent_frames == 1


def test_search_grows_its_room(random_graph, random_rows, plain_search, monkeypatch):
    """Tokens and records begin with room for one."""
    monkeypatch.setattr("oasr_wfst.tokens._SMALLEST_TOKENS", 1)
    monkeypatch.setattr("oasr_wfst.decoder._SMALLEST_RECORDS", 1)
    from oasr_wfst.tokens import Scratch

    monkeypatch.setattr("oasr_wfst.decoder.Scratch.of", lambda states, tokens=1: Scratch(*_scratch(states)))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        graph, rows = random_graph(rng, 20, 4), random_rows(rng, 12, 4)
        expected = plain_search(graph, rows, allow_partial=True)
        path = decode(Decoder(graph, EXACT), rows)
        assert path.score == pytest.approx(expected.score, abs=1e-9)
        assert (path.words, path.frames) == (expected.words, expected.frames)


def _scratch(states):
    kinds = (np.int32, np.float64, np.int32, np.float64, np.int32, np.int32, np.int32, np.uint8)
    return [np.zeros(states, np.int32), *(np.zeros(1, kind) for kind in kinds)]


@pytest.mark.parametrize("threads", [1, 3])
def test_batch_equals_single(threads, digit_graphs, digit_log_probs):
    graph = digit_graphs["G_2_gram"]
    rows = list(digit_log_probs.values())
    decoder = Decoder(graph, threads=threads, blank_threshold=0.98)
    channels = [decoder.open() for _ in rows]
    decoder.advance(channels, rows, whole=True)
    assert [decoder.final(channel) for channel in channels] == [decode(decoder, each) for each in rows]


def test_skipping_blanks_changes_no_words(digit_graphs, digit_log_probs):
    """THREE THREE in digits_02 needs a blank in between; frames are counted with those left out."""
    searched = {}
    for threshold in (1.0, 0.98, 0.5):
        decoder = Decoder(digit_graphs["G_2_gram"], blank_threshold=threshold)
        searched[threshold] = [decode(decoder, rows) for rows in digit_log_probs.values()]
    for threshold in (0.98, 0.5):
        for skipped, complete in zip(searched[threshold], searched[1.0], strict=True):
            assert skipped.words == complete.words
            assert max((abs(a - b) for a, b in zip(skipped.frames, complete.frames, strict=True)), default=0) <= 1
            assert skipped.silent_frames == complete.silent_frames
            assert skipped.score >= complete.score - 1e-9


def test_one_frame_of_each_run_of_blanks_is_searched():
    from oasr_wfst.blanks import BlankSkipper

    blank = np.log(np.array([0.99, 0.99, 0.5, 0.99, 0.98, 0.99, 0.99, 0.99], np.float64))
    rows = np.stack([blank, np.log1p(-np.exp(blank))], axis=1).astype(np.float32)
    expected = [0, 2, 3, 4, 5]
    assert BlankSkipper(0.98, 0).frames(rows).tolist() == expected
    for cut in range(9):
        skipper = BlankSkipper(0.98, 0)
        parts = [skipper.frames(rows[:cut]), skipper.frames(rows[cut:]) + cut]
        assert np.concatenate(parts).tolist() == expected
    assert BlankSkipper(1.0, 0).frames(rows).tolist() == list(range(8))
