"""Streams: any chunks give what one chunk gives, partials grow, memory does not."""

from __future__ import annotations

import numpy as np
import pytest

from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import FINAL, graph_from_arcs


def stream(decoder, rows, sizes, *, lattice=False):
    """Final path and partials of a stream of chunks of ``sizes``, over and over."""
    channel, partials, at, turn = decoder.open(lattice=lattice), [], 0, 0
    while at < len(rows):
        size = sizes[turn % len(sizes)]
        decoder.advance([channel], [np.ascontiguousarray(rows[at : at + size])])
        partials.append(decoder.partial(channel))
        at, turn = at + size, turn + 1
    return channel, decoder.final(channel), partials


@pytest.mark.parametrize("sizes", [(1,), (7,), (3, 0, 11), (64,)])
@pytest.mark.parametrize("threshold", [1.0, 0.98])
def test_any_chunks_equal_one(sizes, threshold, digit_graphs, digit_log_probs):
    for name, graph in digit_graphs.items():
        decoder = Decoder(graph, BeamRules(12.0, 10, 40), blank_threshold=threshold)
        for rows in digit_log_probs.values():
            _, whole, _ = stream(decoder, rows, (len(rows),))
            _, cut, partials = stream(decoder, rows, sizes)
            assert cut == whole, name
            assert [each.settled for each in partials] == sorted(each.settled for each in partials)
            for partial in partials:
                assert partial.words[: partial.settled] == cut.words[: partial.settled]
                assert partial.frames[: partial.settled] == cut.frames[: partial.settled]


def test_random_graphs_in_chunks_equal_the_plain_search_with_online_rules(random_graph, random_rows, plain_search):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        graph, rows = random_graph(rng, 16, 4), random_rows(rng, 20, 4)
        beam = float(rng.uniform(1, 8))
        expected = plain_search(
            graph, rows, search_beam=beam, min_active=2, max_active=6, online=True, allow_partial=True
        )
        decoder = Decoder(graph, BeamRules(beam, 2, 6), blank=0)
        _, path, _ = stream(decoder, rows, [*rng.integers(0, 6, size=5).tolist(), 1])
        if expected.score is None:
            assert path is None, seed
            continue
        assert path.score == pytest.approx(expected.score, abs=1e-9), seed
        assert (path.words, path.frames) == (expected.words, expected.frames), seed


def test_streams_side_by_side_equal_streams_alone(digit_graphs, digit_log_probs):
    decoder = Decoder(digit_graphs["G_2_gram"], threads=2)
    rows = list(digit_log_probs.values())[:6]
    channels = [decoder.open() for _ in rows]
    for at in range(0, max(map(len, rows)), 9):
        decoder.advance(channels, [np.ascontiguousarray(each[at : at + 9]) for each in rows])
    for channel, each in zip(channels, rows, strict=True):
        assert decoder.final(channel) == stream(decoder, each, (len(each),))[1]


def test_long_streams_in_bounded_memory(digit_graphs, digit_log_probs):
    """Ten minutes at 40 ms a frame, of digits over and over: memory settles, and so do the words."""
    graph = digit_graphs["G_2_gram"]
    rows = np.concatenate([digit_log_probs[f"digits_{index:02d}"] for index in range(12)])
    decoder, sizes, settled = Decoder(graph), [], []
    channel = decoder.open()
    once = stream(decoder, rows, (len(rows),))[1]
    for _ in range(15000 // len(rows)):
        decoder.advance([channel], [rows])
        path = decoder.partial(channel)
        sizes.append(channel.nbytes)
        settled.append(path.settled)
    assert max(sizes) == sizes[1] < 4_000_000
    assert len(path.words) >= len(sizes) * (len(once.words) - 2)
    assert len(path.words) - settled[-1] < 10
    assert path.frames == sorted(path.frames)
    assert path.frames[-1] > 0.95 * channel.num_frames


def test_partials_show_the_best_path_wherever_it_ends():
    graph = graph_from_arcs([(0, 1, 1, 0.0, [1]), (1, 2, 2, 0.0, [2]), (2, 3, FINAL, 0.0, [])], 4)
    rows = np.log(np.array([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], np.float32))
    decoder = Decoder(graph, allow_partial=False)
    channel = decoder.open()
    decoder.advance([channel], [rows[:1]])
    partial = decoder.partial(channel)
    assert (partial.words, partial.reached_final) == ([1], False)
    assert decoder.final(channel) is None
    decoder.advance([channel], [rows[1:]])
    assert decoder.final(channel).words == [1, 2]
