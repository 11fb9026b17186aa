"""Lattices and n-best lists, against the enumeration of all paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs

WIDE = BeamRules(float("inf"))


def searched(graph, rows, output_beam, rules=WIDE, chunk=None, **options):
    decoder = Decoder(graph, rules, output_beam=output_beam, **options)
    channel = decoder.open(lattice=True)
    if chunk is None:
        decoder.advance([channel], [rows], whole=True)
    for at in range(0, len(rows) if chunk else 0, chunk or 1):
        decoder.advance([channel], [np.ascontiguousarray(rows[at : at + chunk])])
    return decoder, channel


def lattice_paths(lattice):
    """Score, labels and words of every path, with the arcs that it takes."""
    found = []

    def walk(node, score, labels, words, arcs):
        if node == lattice.num_nodes - 1:
            found.append((score, labels, words, arcs))
        for arc in np.flatnonzero(lattice.source == node).tolist():
            label = int(lattice.label[arc])
            spoken = (int(lattice.word[arc]),) if lattice.word[arc] else ()
            walk(
                int(lattice.dest[arc]),
                score + float(lattice.score[arc]),
                labels + ((label,) if label >= 0 else ()),
                words + spoken,
                [*arcs, arc],
            )

    walk(0, 0.0, (), (), [])
    return found


def close_to(paths):
    """Comparable: sorted, scores rounded."""
    return sorted((round(score, 6), labels, words) for score, labels, words, *_ in paths)


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("output_beam", [1e9, 3.0])
def test_lattices_hold_what_the_output_beam_allows(block, output_beam, random_graph, random_rows, all_paths):
    checked = 0
    for seed in range(20 * block, 20 * (block + 1)):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, 7, 3, acyclic_epsilons=True, epsilons=seed % 2 > 0, arcs_per_state=2)
        rows = random_rows(rng, 4, 3)
        expected = all_paths(graph, rows)
        decoder, channel = searched(graph, rows, output_beam, allow_partial=False)
        lattice = decoder.lattice(channel)
        if not expected:
            assert lattice is None
            continue
        checked += 1
        best = max(score for score, *_ in expected)
        paths = lattice_paths(lattice)
        within = [path for path in paths if path[0] >= best - output_beam]
        assert close_to(within) == close_to(path for path in expected if path[0] >= best - output_beam), seed
        assert {arc for *_, arcs in within for arc in arcs} == set(range(lattice.num_arcs)), seed
        assert decoder.final(channel).score == pytest.approx(best)
    assert checked > 5


@pytest.mark.parametrize("block", range(3))
def test_n_best_are_the_best_different_word_sequences(block, random_graph, random_rows, all_paths):
    for seed in range(20 * block, 20 * (block + 1)):
        rng = np.random.default_rng(seed)
        graph = random_graph(rng, 7, 3, acyclic_epsilons=True, arcs_per_state=2)
        rows = random_rows(rng, 4, 3)
        scores: dict = {}
        for score, _, words in all_paths(graph, rows):
            scores[words] = max(score, scores.get(words, -np.inf))
        expected = sorted(scores.items(), key=lambda item: -item[1])[:5]
        decoder, channel = searched(graph, rows, 1e9, allow_partial=False)
        best = decoder.final(channel)
        if best is None:
            assert not expected
            continue
        found = [best, *decoder.alternatives(channel, best, 4)]
        assert [tuple(path.words) for path in found] == [words for words, _ in expected], seed
        np.testing.assert_allclose([path.score for path in found], [score for _, score in expected], atol=1e-9)
        assert all(len(path.words) == len(path.frames) and path.frames == sorted(path.frames) for path in found)
        assert all(0 <= frame < len(rows) for path in found for frame in path.frames)


@pytest.mark.parametrize("chunk", [None, 1, 7, 64])
def test_pruning_on_the_way_loses_nothing(chunk, digit_graphs, digit_log_probs, monkeypatch):
    """Lattices pruned every 20 frames equal those pruned once, whatever the chunks (the beam never adapts here)."""
    rules = BeamRules(30.0, 0, 10**6)
    for graph in digit_graphs.values():
        for name in ("digits_03", "digits_07", "digits_13"):
            rows = digit_log_probs[name]
            decoder, channel = searched(graph, rows, 6.0, rules, chunk)
            pruned = decoder.lattice(channel)
            with monkeypatch.context() as patch:
                patch.setattr("oasr_wfst.recorder._PRUNE_EVERY", 10**6)
                decoder, channel = searched(graph, rows, 6.0, rules, chunk and len(rows))
                once = decoder.lattice(channel)
            for field in ("source", "dest", "label", "word", "frame"):
                np.testing.assert_array_equal(getattr(pruned, field), getattr(once, field))
            np.testing.assert_allclose(pruned.score, once.score, atol=1e-9)


def test_the_best_path_of_the_lattice_is_the_best_path(digit_graphs, digit_log_probs):
    for graph in digit_graphs.values():
        for rows in digit_log_probs.values():
            decoder, channel = searched(graph, rows, 2.0, BeamRules(15.0, 10, 60), blank_threshold=0.98)
            path, lattice = decoder.final(channel), decoder.lattice(channel)
            score = np.full(lattice.num_nodes, -np.inf)
            score[0] = 0.0
            for arc in range(lattice.num_arcs):
                after = score[lattice.source[arc]] + lattice.score[arc]
                score[lattice.dest[arc]] = max(score[lattice.dest[arc]], after)
            assert score[-1] == pytest.approx(path.score)
            others = decoder.alternatives(channel, path, 3)
            assert all(other.score <= path.score and other.words != path.words for other in others)
            assert lattice.frame.max() < len(rows)
            assert np.all(lattice.source < lattice.dest)
            assert np.all(np.diff(lattice.source) >= 0)


def test_lattices_in_the_form_of_k2(tmp_path, digit_graphs, digit_log_probs):
    """It loads as a graph again, and searched with scores of zero it has the same best path."""
    from oasr_wfst.load import load_graph

    graph = digit_graphs["G_2_gram"]
    decoder, channel = searched(graph, digit_log_probs["digits_03"], 4.0)
    lattice, path = decoder.lattice(channel), decoder.final(channel)
    stored = lattice.to_k2()
    arcs = stored["arcs"]
    assert arcs.dtype == torch.int32
    assert arcs.shape == (lattice.num_arcs, 4)
    np.testing.assert_allclose(arcs[:, 3].contiguous().view(torch.float32).numpy(), lattice.score, rtol=1e-6)
    final = arcs[:, 2] == -1
    assert torch.equal(final, arcs[:, 1] == lattice.num_nodes - 1)
    assert torch.equal(final, stored["aux_labels"] == -1)
    torch.save(stored, tmp_path / "lattice.pt")
    again = load_graph(tmp_path / "lattice.pt")
    neutral = np.zeros((59, 44), np.float32)
    decoder = Decoder(again, WIDE)
    channel = decoder.open()
    decoder.advance([channel], [neutral], whole=True)
    found = decoder.final(channel)
    assert found.words == path.words
    assert found.score == pytest.approx(path.score, abs=1e-3)


def test_lattices_as_openfst_text(digit_graphs, digit_log_probs):
    import kaldifst

    graph = digit_graphs["G_2_gram"]
    decoder, channel = searched(graph, digit_log_probs["digits_03"], 4.0)
    path = decoder.final(channel)
    fst = kaldifst.compile(decoder.lattice(channel).to_openfst(), acceptor=False)
    best = kaldifst.shortest_path(fst)
    _, labels, words, cost = kaldifst.get_linear_symbol_sequence(best)
    assert words == path.words
    assert len(labels) == 59
    assert cost.value == pytest.approx(-path.score, abs=1e-3)


def test_arcs_of_several_words_become_chains():
    arcs = [
        (0, 1, 1, -1.0, [1, 2, 3]),
        (0, 1, 1, -2.0, [4, 5]),
        (1, 2, EPSILON, -0.5, [6]),
        (2, 3, FINAL, -1.0, [7, 8]),
    ]
    rows = np.zeros((1, 2), np.float32)
    decoder, channel = searched(graph_from_arcs(arcs, 4), rows, 100.0)
    lattice = decoder.lattice(channel)
    assert close_to(lattice_paths(lattice)) == [(-3.5, (1,), (4, 5, 6, 7, 8)), (-2.5, (1,), (1, 2, 3, 6, 7, 8))]
    assert np.sum(lattice.label == FINAL) == 1
    assert lattice.word[lattice.label == FINAL].tolist() == [0]
    assert np.all(lattice.source < lattice.dest)


def test_partial_lattices_end_without_the_words_of_the_arcs_that_end_them(random_rows):
    arcs = [
        (0, 1, 1, 0.0, [1]),
        (0, 2, 1, -1.0, [2]),
        (1, 1, 0, -5.0, [3]),
        (2, 2, 0, -0.5, [4]),
        (3, 4, FINAL, 0.0, []),
    ]
    rows = random_rows(np.random.default_rng(0), 1, 2)
    decoder, channel = searched(graph_from_arcs(arcs, 5), rows, 100.0)
    path = decoder.final(channel)
    assert [path.words, *[other.words for other in decoder.alternatives(channel, path, 5)]] == [[2], [1]]
    refusing, channel = searched(graph_from_arcs(arcs, 5), rows, 100.0, allow_partial=False)
    assert refusing.lattice(channel) is None


def test_epsilon_cycles_are_cut_off_the_best_path():
    arcs = [
        (0, 1, 1, 0.0, [1]),
        (1, 2, EPSILON, 0.0, [2]),
        (2, 1, EPSILON, -0.5, [3]),
        (2, 3, FINAL, 0.0, []),
        (1, 1, EPSILON, -0.1, [4]),
    ]
    rows = np.zeros((1, 2), np.float32)
    decoder, channel = searched(graph_from_arcs(arcs, 4), rows, 100.0)
    path, lattice = decoder.final(channel), decoder.lattice(channel)
    assert path.words == [1, 2]
    assert [each[2] for each in lattice_paths(lattice)] == [(1, 2)]


def test_a_lattice_must_be_asked_for_in_time(digit_graphs):
    decoder = Decoder(digit_graphs["G_2_gram"])
    with pytest.raises(ValueError, match="lattice=True"):
        decoder.lattice(decoder.open())
