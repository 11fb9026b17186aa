"""Random graphs, the fixtures' graphs, and a search in plain Python to compare with."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs

INF = math.inf


@dataclass
class Found:
    """What the plain search finds; ``score`` is ``None`` where there is no path."""

    score: float | None
    words: list = field(default_factory=list)
    frames: list = field(default_factory=list)
    reached_final: bool = False
    trace: list = field(default_factory=list)


def leaving(graph, state):
    for arc in range(graph.arc_begin[state], graph.arc_begin[state + 1]):
        words = graph.words[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist()
        yield int(graph.dest[arc]), int(graph.label[arc]), float(graph.score[arc]), words


def with_epsilons(graph, tokens, cutoff, frame):
    """Follow epsilon arcs until nothing becomes better; tokens are ``state -> (score, ((word, frame), ...))``."""
    tokens = dict(tokens)
    changed = True
    while changed:
        changed = False
        for state in list(tokens):
            for dest, label, score, words in leaving(graph, state):
                if label != EPSILON:
                    continue
                after = tokens[state][0] + score
                if after > cutoff and (dest not in tokens or after > tokens[dest][0]):
                    tokens[dest] = (after, tokens[state][1] + tuple((word, frame) for word in words))
                    changed = True
    return tokens


def widened(beam, active, search_beam, fewest, most, may_shrink):
    """k2's rule for the beam of a frame, as its documentation and comments tell it."""
    if active > most:
        return 0.8 * min(beam, search_beam) if may_shrink else beam
    if 0 < active < fewest:
        return 1.25 * max(beam, search_beam)
    return 0.8 * beam + 0.2 * search_beam


@pytest.fixture(scope="session")
def plain_search():
    """``plain_search(graph, rows, search_beam, min_active, max_active, online, allow_partial) -> Found``."""

    def search(graph, rows, *, search_beam=INF, min_active=30, max_active=10000, online=False, allow_partial=False):
        tokens = with_epsilons(graph, {0: (0.0, ())}, -search_beam, 0)
        beam, trace, dead = search_beam, [], False
        for step, row in enumerate(rows):
            final_step = len(rows) + 1
            ending = not online and step + 5 >= final_step
            fewest = max(min_active, max_active / 2) if ending else min_active
            active = 0 if dead else len(tokens)
            beam = widened(beam, active, search_beam, fewest, max_active, not ending)
            trace.append((beam, active))
            if dead:
                continue
            candidates = [
                (before + score + float(row[label]), dest, history + tuple((word, step) for word in words))
                for state, (before, history) in tokens.items()
                for dest, label, score, words in leaving(graph, state)
                if label >= 0
            ]
            cutoff = max((each[0] for each in candidates), default=-INF) - beam
            following = {}
            for after, dest, history in candidates:
                if after > cutoff and (dest not in following or after > following[dest][0]):
                    following[dest] = (after, history)
            following = with_epsilons(graph, following, cutoff, step)
            if following:
                tokens = following
            else:
                dead = True
        ends = [
            (before + score, history + tuple((word, max(len(rows) - 1, 0)) for word in words))
            for state, (before, history) in tokens.items()
            for _, label, score, words in leaving(graph, state)
            if label == FINAL
        ]
        reached = bool(ends) and not dead
        if dead and allow_partial:
            ends = list(tokens.values())
        elif dead:
            ends = []
        elif not ends and allow_partial:
            ends = [
                (before + score, history)
                for state, (before, history) in tokens.items()
                for _, label, score, _ in leaving(graph, state)
                if label >= 0
            ]
        if not ends:
            return Found(None, trace=trace)
        score, history = max(ends, key=lambda each: each[0])
        return Found(score, [word for word, _ in history], [frame for _, frame in history], reached, trace)

    return search


@pytest.fixture(scope="session")
def all_paths():
    """``all_paths(graph, rows)``: score, labels and words of every complete path of a graph without epsilon cycles."""

    def enumerate_paths(graph, rows):
        found = []

        def walk(state, step, score, labels, words):
            for dest, label, weight, spoken in leaving(graph, state):
                if label == FINAL and step == len(rows):
                    found.append((score + weight, tuple(labels), tuple(words + spoken)))
                elif label == EPSILON:
                    walk(dest, step, score + weight, labels, words + spoken)
                elif label >= 0 and step < len(rows):
                    walk(dest, step + 1, score + weight + float(rows[step][label]), [*labels, label], words + spoken)

        walk(0, 0, 0.0, [], [])
        return found

    return enumerate_paths


@pytest.fixture(scope="session")
def random_graph():
    """``random_graph(rng, states, labels, epsilons=True, finals=True)``: no shape is ruled out.

    Self-loops, parallel arcs, dead ends, states out of reach, epsilon cycles (unless ``acyclic_epsilons``), arcs with
    several words, final arcs anywhere or, without ``finals``, at most behind a state that nothing reaches.
    """

    def build(rng, states, labels, *, epsilons=True, finals=True, acyclic_epsilons=False, arcs_per_state=3):
        last = states - 1
        arcs = []
        for state in range(last):
            for _ in range(rng.integers(0, arcs_per_state + 1) if state else arcs_per_state):
                dest, words = int(rng.integers(0, last)), rng.integers(1, 9, size=rng.choice([0, 0, 1, 2])).tolist()
                score = -float(np.float32(rng.exponential(1.5)))
                if epsilons and rng.random() < 0.25:
                    # Epsilon arcs may gain only where none of them can be taken again.
                    if acyclic_epsilons and dest > state:
                        arcs.append((state, dest, EPSILON, score + float(np.float32(rng.random())), words))
                    elif not acyclic_epsilons:
                        arcs.append((state, dest, EPSILON, score, words))
                else:
                    arcs.append((state, dest, int(rng.integers(0, labels)), score, words))
            if finals and rng.random() < 0.4:
                arcs.append(
                    (state, last, FINAL, -float(rng.random()), rng.integers(1, 9, size=rng.integers(0, 2)).tolist())
                )
        if not finals:
            arcs.append((last - 1, last, FINAL, -0.5, []))
            arcs = [arc for arc in arcs if arc[1] != last - 1]
        return graph_from_arcs(arcs, states, symbols=["<eps>", *"abcdefgh"])

    return build


@pytest.fixture(scope="session")
def random_rows():
    """``random_rows(rng, frames, labels)``: float32 log posteriors."""

    def build(rng, frames, labels):
        rows = rng.normal(size=(frames, labels)) * 2
        return (rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))).astype(np.float32)

    return build


@pytest.fixture(scope="session")
def digits(shared_fixtures):
    """The folder of the icefall digits model with its graphs and reference results."""
    return shared_fixtures / "icefall_digits"


@pytest.fixture(scope="session")
def digit_graphs(digits):
    """The two digit graphs, ``G_2_gram`` and ``G_4digits``, from their plain JSON form."""
    words = [line.split()[0] for line in (digits / "graph/words.txt").read_text().splitlines()]
    graphs = {}
    for name, file in (("G_2_gram", "HLG_k2.json"), ("G_4digits", "HLG_4digits_k2.json")):
        stored = json.loads((digits / "graph" / file).read_text())
        arcs = [
            (*arc, [word for word in aux if word > 0])
            for arc, aux in zip(stored["arcs"], stored["aux_labels"], strict=True)
        ]
        graphs[name] = graph_from_arcs(arcs, stored["num_states"], symbols=words)
    return graphs


@pytest.fixture(scope="session")
def digit_log_probs(digits):
    """``utterance -> (frames, labels)`` float32."""
    from safetensors.numpy import load_file

    stored = load_file(digits / "oracle/offline.safetensors")
    suffix = ".ctc_log_probs"
    return {
        name.removesuffix(suffix): np.ascontiguousarray(array, np.float32)
        for name, array in stored.items()
        if name.endswith(suffix)
    }


@pytest.fixture(scope="session")
def digit_oracle(digits):
    """``graph -> utterance -> results of the reference decoders``."""
    stored = json.loads((digits / "oracle/graph_decode.json").read_text())
    return {name: stored[name]["utterances"] for name in ("G_2_gram", "G_4digits")}
