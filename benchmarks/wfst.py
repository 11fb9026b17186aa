"""WFST decoding on the CPU against kaldi-decoder, on a graph of more than a million arcs; one run, both figures.

    python benchmarks/wfst.py [--words 20000] [--bigrams 260000] [--beams 15 20] [--graph IMAGE]

The graph is made: a lexicon of random spellings over 499 tokens, a bigram with back-off over random pairs, built as
``oasr wfst build`` does (``--graph`` takes an image instead). Emissions follow random paths through it: 300 frames
each, the path's label 9 above noise of deviation 2 before the softmax. Both decoders are given the same beam, at least
30 and at most 10,000 active states, the same graph and log-probs, and no blank skipping; the cost of the best path has
to be equal. Timed are decoding and best path: one utterance on one thread, and eight on two (kaldi-decoder, which has
no batches, one after the other on one thread, and on two threads of one process). Best of three.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oasr_wfst.beam import BeamRules
from oasr_wfst.build import build_graph
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import EPSILON, FINAL, Graph
from oasr_wfst.load import load_graph

FRAMES, UTTERANCES, TOKENS = 300, 8, 499


def make_graph(words: int, bigrams: int, folder: Path) -> Graph:
    """Random lexicon and bigram, built into a graph."""
    random = np.random.default_rng(0)
    tokens, lexicon, arpa = folder / "tokens.txt", folder / "lexicon.txt", folder / "g.arpa"
    tokens.write_text("<blk> 0\n" + "".join(f"t{i} {i}\n" for i in range(1, TOKENS + 1)))
    names = [f"w{i}" for i in range(words)]
    spellings = {tuple(random.integers(1, TOKENS + 1, random.integers(2, 6))) for _ in range(2 * words)}
    ordered = sorted(spellings)[:: max(len(spellings) // words, 1)][:words]
    lines = (" ".join([name, *(f"t{t}" for t in spelling)]) for name, spelling in zip(names, ordered, strict=False))
    lexicon.write_text("".join(line + "\n" for line in lines))
    names = names[: len(ordered)]
    log_probs = np.log10(random.dirichlet(np.full(len(names) + 1, 0.5)) + 1e-9)
    pairs = {(int(a), int(b)) for a, b in random.integers(0, len(names), (bigrams, 2))}
    with arpa.open("w") as out:
        out.write(f"\\data\\\nngram 1={len(names) + 2}\nngram 2={len(pairs)}\n\n\\1-grams:\n-99 <s> -0.3\n")
        out.write(f"{log_probs[-1]:.4f} </s>\n")
        out.writelines(f"{p:.4f} {name} -0.3\n" for name, p in zip(names, log_probs, strict=False))
        out.write("\n\\2-grams:\n")
        out.writelines(f"{-random.uniform(0.2, 2.5):.4f} {names[a]} {names[b]}\n" for a, b in sorted(pairs))
        out.write("\n\\end\\\n")
    return build_graph(tokens, lexicon, arpa=arpa)


def emissions(graph: Graph, seed: int) -> np.ndarray:
    """``(frames, columns)`` log posteriors of a random path."""
    random = np.random.default_rng(seed)
    state, labels = 0, []
    while len(labels) < FRAMES:
        first, last = graph.arc_begin[state], graph.arc_begin[state + 1]
        weight = np.exp(graph.score[first:last].astype(np.float64))
        weight[graph.label[first:last] == FINAL] = 0.0
        if weight.sum() == 0:
            state = 0
            continue
        arc = first + random.choice(last - first, p=weight / weight.sum())
        if graph.label[arc] != EPSILON:
            labels.append(int(graph.label[arc]))
        state = int(graph.dest[arc])
    logits = random.normal(size=(FRAMES, graph.num_columns)).astype(np.float32) * 2
    logits[np.arange(FRAMES), labels] += 9
    return np.ascontiguousarray(torch.log_softmax(torch.from_numpy(logits), -1).numpy())


def rival_graph(graph: Graph) -> Any:
    import kaldifst

    fst = kaldifst.StdVectorFst()
    for _ in range(graph.num_states - 1):
        fst.add_state()
    fst.start = 0
    source = np.repeat(np.arange(graph.num_states), np.diff(graph.arc_begin)).tolist()
    arcs = zip(source, graph.dest.tolist(), graph.label.tolist(), graph.score.tolist(), strict=True)
    for state, dest, label, score in arcs:
        if label == FINAL:
            fst.set_final(state, -score)
        else:
            fst.add_arc(state, kaldifst.StdArc(label + 1 if label >= 0 else 0, 0, -score, dest))
    return fst


def rival_decoder(fst: Any, beam: float) -> Any:
    import kaldi_decoder

    return kaldi_decoder.FasterDecoder(
        fst, kaldi_decoder.FasterDecoderOptions(beam=beam, max_active=10000, min_active=30)
    )


def rival_decode(decoder: Any, log_probs: np.ndarray) -> float:
    """Cost of the best path."""
    import kaldi_decoder
    import kaldifst

    decoder.decode(kaldi_decoder.DecodableCtc(log_probs))
    _, best = decoder.get_best_path()
    weight = kaldifst.get_linear_symbol_sequence(best)[-1]
    return float(weight.value1 + weight.value2) if hasattr(weight, "value1") else float(weight.value)


def fastest(call: Callable[[], object], repeats: int = 3) -> float:
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun)
    return best


def in_threads(calls: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compare(graph: Graph, fst: Any, rows: list[np.ndarray], beam: float) -> None:
    rules = BeamRules(beam, min_active=30, max_active=10000)
    single, double = (Decoder(graph, rules, threads=threads, blank_threshold=1.0) for threads in (1, 2))
    single.warm_up()

    def ours(decoder: Decoder, batch: list[np.ndarray]) -> list[float]:
        channels = [decoder.open() for _ in batch]
        decoder.advance(channels, batch, whole=True)
        paths = [decoder.final(channel) for channel in channels]
        return [-path.score if path is not None else float("inf") for path in paths]

    theirs = [rival_decoder(fst, beam) for _ in range(2)]
    costs = ours(single, rows)
    rival_costs = [rival_decode(theirs[0], row) for row in rows]
    apart = max(abs(a - b) for a, b in zip(costs, rival_costs, strict=True))
    one = fastest(lambda: ours(single, rows[:1])), fastest(lambda: rival_decode(theirs[0], rows[0]))
    batch = fastest(lambda: ours(double, rows))
    halves = [
        (lambda d=decoder, part=rows[index::2]: [rival_decode(d, row) for row in part])
        for index, decoder in enumerate(theirs)
    ]
    rival_one = fastest(lambda: [rival_decode(theirs[0], row) for row in rows])
    rival_two = fastest(lambda: in_threads(list(halves)))
    frame = 1e6 / FRAMES
    print(f"beam {beam:g}: best costs differ by {apart:.4f} at most (first: {costs[0]:.3f})")
    print(f"  1 utterance, 1 thread : ours {one[0] * frame:7.0f} us a frame, kaldi-decoder {one[1] * frame:7.0f}")
    print(
        f"  8 utterances          : ours {batch * frame / 8:7.0f} us a frame on 2 threads, kaldi-decoder "
        f"{rival_one * frame / 8:7.0f} on 1, {rival_two * frame / 8:7.0f} on 2",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=20000)
    parser.add_argument("--bigrams", type=int, default=260000)
    parser.add_argument("--beams", type=float, nargs="+", default=[15.0, 20.0])
    parser.add_argument("--graph", type=Path)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    if arguments.graph is not None:
        graph = load_graph(arguments.graph)
    else:
        with tempfile.TemporaryDirectory() as folder:
            graph = make_graph(arguments.words, arguments.bigrams, Path(folder))
    print(
        f"graph: {graph.num_states:,} states, {graph.num_arcs:,} arcs, {int(graph.epsilon_count.sum()):,} epsilons, "
        f"{graph.num_bytes / 2**20:.0f} MiB, in {time.perf_counter() - begun:.1f} s"
    )
    rows = [emissions(graph, seed) for seed in range(UTTERANCES)]
    fst = rival_graph(graph)
    for beam in arguments.beams:
        compare(graph, fst, rows, beam)


if __name__ == "__main__":
    main()
