"""The search on the GPU, in Triton's interpreter, against the compiled one; run by test_triton_search.py.

The interpreter takes a tenth of a second a frame. It has to be chosen before Triton is imported, hence a process of its
own.
"""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oasr_core.decoding.base import DecodeContext
from oasr_core.models.base import EncoderOutput
from oasr_core.request import DecodingOptions
from oasr_core.testing.decoding import ByteTokenizer
from oasr_wfst import triton_lanes, triton_search
from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs
from oasr_wfst.log_probs import InvalidLogProbsError
from oasr_wfst.options import CtcWfstOptions
from oasr_wfst.strategy import CtcWfstStrategy
from oasr_wfst.triton_search import TritonDecoder

DATA = Path(__file__).parent / "data"
GRAPHS = ("G_2_gram", "G_4digits")


@pytest.fixture(autouse=True)
def shape(monkeypatch):
    """``shape(programs, block, piece)``; the least that is exact, unless a test wants more programs and blocks."""

    def reshape(programs=1, block=512, piece=64):
        monkeypatch.setattr(triton_lanes, "PROGRAMS", programs)
        monkeypatch.setattr(triton_lanes, "BLOCK", block)
        for module in (triton_lanes, triton_search):
            monkeypatch.setattr(module, "PIECE", piece)

    assert triton_lanes.INTERPRETED
    reshape()
    return reshape


def on_gpu(graph, rules, **settings):
    return TritonDecoder(graph, rules, device=torch.device("cpu"), **settings)


def search(decoder, rows, chunks=None, *, whole=True):
    """Trace, path, tokens, and alternatives where the decoder keeps lattices."""
    channel, traces = decoder.open(), []
    for chunk in chunks or [rows]:
        decoder.advance([channel], [chunk], whole=whole, traces=traces)
    tokens = sorted(zip(channel.states.tolist(), channel.scores.tolist(), strict=True))
    return np.concatenate(traces).tolist(), decoder.final(channel), tokens


def case(seed, random_graph, random_rows, most_frames):
    rng = np.random.default_rng(seed)
    labels, states = int(rng.integers(2, 6)), int(rng.integers(3, 24))
    epsilons = {"epsilons": seed % 3 > 0, "acyclic_epsilons": seed % 3 > 1}
    graph = random_graph(rng, states, labels, finals=seed % 5 > 0, **epsilons)
    rows = random_rows(rng, int(rng.integers(0, most_frames)), labels)
    rules = BeamRules(float(rng.uniform(0.5, 6.0)), int(rng.integers(0, 4)), int(rng.integers(4, 9)))
    return graph, rows, rules


@pytest.mark.parametrize("block", range(3))
def test_random_graphs_have_the_trace_path_and_scores_of_the_compiled_search(block, shape, random_graph, random_rows):
    """Epsilons, self-loops, dead ends and finals out of reach; some in several programs and small blocks."""
    kinds = set()
    for seed in range(10 * block, 10 * (block + 1)):
        graph, rows, rules = case(seed, random_graph, random_rows, 9)
        shape(*((2, 16) if seed % 4 == 1 else ()))
        whole, allow_partial = seed % 4 < 3, seed % 2 > 0
        expected = search(Decoder(graph, rules, allow_partial=allow_partial), rows, whole=whole)
        found = search(on_gpu(graph, rules, allow_partial=allow_partial), rows, whole=whole)
        assert found == expected, seed
        path = found[1]
        kinds.add("none" if path is None else "final" if path.reached_final else "partial")
    assert kinds == {"none", "final", "partial"}


@pytest.mark.parametrize("name", GRAPHS)
def test_digits_have_words_and_cost_of_the_reference(name, digit_graphs, digit_log_probs, digit_oracle):
    graph = digit_graphs[name]
    utterance = min(digit_log_probs, key=lambda each: len(digit_log_probs[each]))
    rows = digit_log_probs[utterance]
    settings = {"blank_threshold": 0.98}
    expected = search(Decoder(graph, BeamRules(), **settings), rows)
    found = search(on_gpu(graph, BeamRules(), **settings), rows)
    assert found == expected
    reference = digit_oracle[name][utterance]["beam_inf"]
    assert [graph.symbols[word] for word in found[1].words] == reference["words"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPHS)
def test_without_a_beam_the_cost_is_that_of_the_reference(name, digit_graphs, digit_log_probs, digit_oracle):
    graph = digit_graphs[name]
    utterances = sorted(digit_oracle[name], key=lambda each: len(digit_log_probs[each]))[:3]
    decoder = on_gpu(graph, BeamRules(math.inf))
    channels = [decoder.open() for _ in utterances]
    decoder.advance(channels, [digit_log_probs[each] for each in utterances], whole=True)
    for channel, utterance in zip(channels, utterances, strict=True):
        path, reference = decoder.final(channel), digit_oracle[name][utterance]["beam_inf"]
        assert [graph.symbols[word] for word in path.words] == reference["words"]
        assert -path.score == pytest.approx(reference["cost"], abs=1e-2)


@pytest.mark.parametrize("tables", [1 << 30, 1])
def test_batch_equals_single_and_memory_for_one_lane_serves_all(tables, random_graph, random_rows, monkeypatch):
    monkeypatch.setattr(triton_search, "_TABLE_BYTES", tables)
    rng = np.random.default_rng(7)
    graph = random_graph(rng, 20, 4)
    rows = [random_rows(rng, frames, 4) for frames in (3, 0, 5)]
    decoder = on_gpu(graph, BeamRules(4.0, 2, 6))
    channels, traces = [decoder.open() for _ in rows], []
    decoder.advance(channels, rows, whole=True, traces=traces)
    for channel, trace, each in zip(channels, traces, rows, strict=True):
        alone = search(Decoder(graph, BeamRules(4.0, 2, 6)), each)
        assert (trace.tolist(), decoder.final(channel)) == alone[:2]


def test_room_grows_and_the_frame_is_searched_again(random_graph, random_rows, monkeypatch):
    monkeypatch.setattr(triton_search, "_SMALLEST_ROOM", 1)
    monkeypatch.setattr(triton_search, "_LARGEST_ROOM", 1)
    monkeypatch.setattr("oasr_wfst.decoder._SMALLEST_RECORDS", 1)
    rooms = set()
    for seed in (2, 7):
        rng = np.random.default_rng(seed)
        graph, rows = random_graph(rng, 20, 4, acyclic_epsilons=seed == 2), random_rows(rng, 4, 4)
        decoder = on_gpu(graph, BeamRules(math.inf))
        rooms.add(decoder._lanes.room)
        with torch.inference_mode(seed == 2):
            found = search(decoder, rows)
        assert found == search(decoder, rows) == search(Decoder(graph, BeamRules(math.inf)), rows)
        rooms.add(decoder._lanes.room)
    assert len(rooms) > 1


def test_chunks_and_pieces_of_any_size_equal_one(shape, random_graph, random_rows):
    rng = np.random.default_rng(11)
    graph, rows = random_graph(rng, 20, 4), random_rows(rng, 7, 4)
    rules = BeamRules(5.0, 2, 8)
    expected = search(Decoder(graph, rules), rows, whole=False)
    decoder = on_gpu(graph, rules)
    assert search(decoder, rows, [rows[:2], rows[2:2], rows[2:3], rows[3:]], whole=False) == expected
    shape(piece=3)
    assert search(on_gpu(graph, rules), rows, whole=False) == expected


def test_impossible_frames_end_every_path():
    graph = graph_from_arcs([(0, 0, 0, 0.0, []), (0, 1, 1, 0.0, [1]), (1, 1, 0, 0.0, []), (1, 2, FINAL, 0.0, [])], 3)
    rows = np.full((3, 2), -np.inf, np.float32)
    rows[0, 1] = 0.0
    for allow_partial in (True, False):
        expected = search(Decoder(graph, allow_partial=allow_partial), rows)
        assert search(on_gpu(graph, BeamRules(), allow_partial=allow_partial), rows) == expected


def test_epsilon_cycles_of_no_weight_end():
    """Nothing gains by going round, so nobody goes round."""
    arcs = [
        (0, 1, 1, 0.0, [1]),
        (1, 2, EPSILON, 0.0, []),
        (2, 3, EPSILON, 0.0, [2]),
        (3, 1, EPSILON, 0.0, []),
        (3, 1, 0, -1.0, []),
        (2, 4, FINAL, 0.0, []),
    ]
    rows = np.log(np.array([[0.1, 0.9], [0.9, 0.1]], np.float32))
    graph = graph_from_arcs(arcs, 5)
    assert search(on_gpu(graph, BeamRules()), rows) == search(Decoder(graph), rows)


@pytest.fixture(scope="module")
def strategies():
    model = SimpleNamespace(interfaces={"ctc": SimpleNamespace(blank_id=0, vocab_size=44)})
    files = {"fst_path": DATA / "HLG.pt", "words": DATA / "words.txt"}
    return [
        CtcWfstStrategy(DecodeContext(model, ByteTokenizer(), CtcWfstOptions(**files, backend=backend)))
        for backend in ("triton", "cpu")
    ]


def output(rows):
    lengths = torch.tensor([len(row) for row in rows])
    padded = torch.full((len(rows), max(lengths.tolist()), 44), math.nan)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = torch.from_numpy(row)
    return EncoderOutput(torch.zeros(1), lengths, padded)


def test_the_strategy_gives_the_same_alternatives_and_partials(strategies, digit_log_probs):
    rows = [digit_log_probs["digits_03"][:40], digit_log_probs["digits_04"][:25]]
    wanted = [DecodingOptions(n_best=3), DecodingOptions()]
    results = []
    for strategy in strategies:
        streams = [strategy.open(each) for each in wanted]
        parts = [strategy.decode_chunk(streams, output([row[:20] for row in rows]), [False, False])]
        parts.append(strategy.decode_chunk(streams, output([row[20:] for row in rows]), [False, True]))
        results.append([*parts, [strategy.current(streams[0])]])
    assert type(strategies[0].decoder) is TritonDecoder
    assert results[0] == results[1]
    assert len(results[0][-1][0].nbest) > 1


def test_posteriors_that_are_none_are_refused_before_any_stream_has_changed(strategies, digit_log_probs):
    strategy = strategies[0]
    rows = [digit_log_probs["digits_03"][:5].copy(), digit_log_probs["digits_04"][:5].copy()]
    rows[1][3, 2] = math.inf
    streams = [strategy.open(DecodingOptions()) for _ in rows]
    with pytest.raises(InvalidLogProbsError, match=r"row 1 are NaN or \+inf, first in frame 3"):
        strategy.decode_chunk(streams, output(rows), [False, False])
    assert [stream.channel.num_frames for stream in streams] == [0, 0]
