"""Built graphs: the same costs as the reference graphs, as a plain search over sentences, and as the language model."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import random
from pathlib import Path

import kaldifst
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from oasr_wfst.arpa import read_arpa
from oasr_wfst.build import build_graph
from oasr_wfst.errors import GraphError
from oasr_wfst.grammar import grammar_from_arpa, read_grammar
from oasr_wfst.graph import EPSILON, FINAL
from oasr_wfst.lexicon import read_lexicon
from oasr_wfst.load import load_graph
from oasr_wfst.symbols import SymbolTable, read_symbols

DATA = Path(__file__).parent / "data"
FIXTURE = {"tokens": DATA / "tokens.txt", "lexicon": DATA / "lexicon.txt", "words": DATA / "words.txt"}


def best_path(graph, log_probs):
    """Score and word ids of the best path that ends in the last state: plain Viterbi, ``None`` where there is none."""
    last = graph.num_states - 1
    leaving = [range(graph.arc_begin[state], graph.arc_begin[state + 1]) for state in range(graph.num_states)]
    dest, label, score = graph.dest.tolist(), graph.label.tolist(), graph.score.tolist()
    spoken = [
        tuple(graph.words[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist()) for arc in range(graph.num_arcs)
    ]

    def offer(paths, state, value, words):
        if state not in paths or value > paths[state][0]:
            paths[state] = (value, words)
            return True
        return False

    def follow_epsilons(paths):
        waiting = list(paths)
        while waiting:
            state = waiting.pop()
            for arc in leaving[state]:
                if label[arc] == EPSILON:
                    value, words = paths[state]
                    if offer(paths, dest[arc], value + score[arc], words + spoken[arc]):
                        waiting.append(dest[arc])

    paths = {0: (0.0, ())}
    follow_epsilons(paths)
    for frame in log_probs:
        after = {}
        for state, (value, words) in paths.items():
            for arc in leaving[state]:
                if label[arc] >= 0:
                    offer(after, dest[arc], value + score[arc] + float(frame[label[arc]]), words + spoken[arc])
        follow_epsilons(after)
        paths = after
    ends = {}
    for state, (value, words) in paths.items():
        for arc in leaving[state]:
            if label[arc] == FINAL:
                offer(ends, last, value + score[arc], words + spoken[arc])
    return ends.get(last)


def random_log_probs(seed, frames, columns, sharpness=3.0):
    logits = np.random.default_rng(seed).normal(size=(frames, columns)) * sharpness
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def emissions(repo_root):
    """CTC log-probabilities of the small icefall model for recordings, by name, and random ones."""
    stored = load_file(repo_root / "tests" / "data" / "icefall_digits" / "oracle" / "offline.safetensors")
    found = {name.split(".")[0]: array for name, array in stored.items() if name.endswith(".ctc_log_probs")}
    assert len(found) >= 4
    return {**found, **{f"random {seed}": random_log_probs(seed, 12, 44) for seed in range(3)}}


@pytest.mark.parametrize(
    ("grammar", "reference", "size"),
    [
        ({"arpa": DATA / "G_2_gram.arpa"}, "HLG_G_2_gram.fst", (59, 342)),
        ({"arpa": DATA / "G_2_gram.arpa", "remove_epsilons": True}, "HLG.pt", (48, 315)),
        ({"grammar": DATA / "G_2_gram.fst.txt"}, "HLG.pt", (59, 342)),
        ({"grammar": DATA / "G_4digits.fst.txt"}, "HLG_4digits.pt", (118, 572)),
    ],
)
def test_a_built_graph_is_the_reference_graph(emissions, grammar, reference, size):
    graph = build_graph(**FIXTURE, **grammar)
    assert (graph.num_states, graph.num_arcs) == size
    assert graph.has_epsilons == (size == (59, 342))
    wanted = load_graph(DATA / reference)
    for log_probs in emissions.values():
        mine, theirs = best_path(graph, log_probs), best_path(wanted, log_probs)
        assert mine[1] == theirs[1]
        assert mine[0] == pytest.approx(theirs[0], abs=1e-3)


def test_the_built_graph_has_the_costs_of_the_reference_decoder(shared_fixtures):
    folder = shared_fixtures / "icefall_digits" / "oracle"
    reference = json.loads((folder / "graph_decode.json").read_text())
    stored = load_file(folder / "offline.safetensors")
    for name, grammar in (
        ("G_2_gram", {"arpa": DATA / "G_2_gram.arpa"}),
        ("G_4digits", {"grammar": DATA / "G_4digits.fst.txt"}),
    ):
        graph = build_graph(**FIXTURE, **grammar)
        for utterance, results in reference[name]["utterances"].items():
            score, words = best_path(graph, stored[f"{utterance}.ctc_log_probs"])
            assert [graph.symbols[word] for word in words] == results["beam_inf"]["words"]
            assert -score == pytest.approx(results["beam_inf"]["cost"], abs=1e-2)


def test_stages_are_reported_with_their_sizes():
    stages = []
    build_graph(**FIXTURE, arpa=DATA / "G_2_gram.arpa", remove_epsilons=True, report=stages.append)
    assert [(stage.name, stage.states, stage.arcs) for stage in stages] == [
        ("lexicon", 11, 21),
        ("grammar", 12, 65),
        ("composition", 22, 75),
        ("determinization", 25, 78),
        ("minimization", 25, 78),
        ("epsilon removal", 24, 120),
        ("ctc topology", 48, 315),
    ]
    assert all(stage.seconds >= 0 for stage in stages)
    assert stages[0].remark == "10 pronunciations"


def test_without_a_table_words_are_numbered_as_in_the_lexicon():
    graph = build_graph(FIXTURE["tokens"], FIXTURE["lexicon"], arpa=DATA / "G_2_gram.arpa")
    assert list(graph.symbols)[:3] == ["<eps>", "EIGHT", "FIVE"]
    assert len(graph.tokens) == 44
    assert graph.note == "ctc: tokens.txt + lexicon.txt + G_2_gram.arpa"


# The whole construction against all sentences of small grammars


@pytest.fixture
def written(tmp_path):
    """``written(**texts)``: files by name."""

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
        return [tmp_path / f"{name}.txt" for name in texts]

    return write


def collapsed(labels):
    return tuple(label for label, _ in itertools.groupby(labels) if label)


def best_by_enumeration(spellings, log_probs, cost):
    """Best score over all label sequences that spell a sentence: ``(score, sentences of that score)``."""
    best = {}
    for labels in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        tokens = collapsed(labels)
        if tokens in spellings:
            score = sum(float(log_probs[frame, label]) for frame, label in enumerate(labels)) - cost
            best[tokens] = max(best.get(tokens, -math.inf), score)
    top = max(best.values())
    return top, {sentence for tokens, score in best.items() if score > top - 1e-6 for sentence in spellings[tokens]}


LEXICONS = {
    "prefixes": {"a": ["x"], "ab": ["x y"], "abb": ["x y y"], "b": ["y"]},
    "homophones": {"right": ["x y"], "write": ["x y"], "rite": ["x y"], "x": ["x"]},
    "variants": {"a": ["x", "y"], "b": ["y y", "x y"]},
}


@pytest.mark.parametrize("remove_epsilons", [False, True])
@pytest.mark.parametrize("name", LEXICONS)
def test_every_sentence_costs_what_its_best_alignment_costs(written, name, remove_epsilons):
    lexicon = LEXICONS[name]
    words = list(lexicon)
    sentences = [(word,) for word in words] + [(words[0], words[0]), (words[1], words[0]), (words[0], words[1])]
    files = written(
        tokens="<blk> 0\nx 1\ny 2\n",
        lexicon="".join(f"{word} {spelling}\n" for word, each in lexicon.items() for spelling in each),
        grammar="# all of them\n" + "".join(" ".join(sentence) + "\n" for sentence in sentences),
    )
    graph = build_graph(files[0], files[1], grammar=files[2], remove_epsilons=remove_epsilons)
    ids = {"x": 1, "y": 2}
    spellings = {}
    for sentence in sentences:
        for choice in itertools.product(*(lexicon[word] for word in sentence)):
            spellings.setdefault(tuple(ids[token] for part in choice for token in part.split()), set()).add(sentence)
    for seed, frames in itertools.product(range(4), (2, 4, 6)):
        log_probs = random_log_probs(seed, frames, 3)
        score, found = best_path(graph, log_probs)
        wanted, best = best_by_enumeration(spellings, log_probs, math.log(len(sentences)))
        # Costs are rounded to 1/1024 where states are compared.
        assert score == pytest.approx(wanted, abs=0.004)
        assert tuple(graph.symbols[word] for word in found) in best


def test_repeated_sentences_are_loops(written):
    files = written(tokens="<blk> 0\nx 1\ny 2\n", lexicon="a x\nb y\n", grammar="a\nb\n")
    once = build_graph(files[0], files[1], grammar=files[2])
    often = build_graph(files[0], files[1], grammar=files[2], repeat=True)
    log_probs = np.log(np.array([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]))
    assert [often.symbols[word] for word in best_path(often, log_probs)[1]] == ["a", "b", "b"]
    assert best_path(often, log_probs)[0] == pytest.approx(4 * math.log(0.8) - 3 * math.log(2), abs=0.004)
    assert len(best_path(once, log_probs)[1]) == 1
    assert best_path(often, np.log(np.full((1, 3), 1 / 3)))[1] != ()


def test_equal_tokens_of_two_words_need_a_blank_between_them(written):
    files = written(tokens="<blk> 0\nx 1\n", lexicon="a x\n", grammar="a a\n")
    graph = build_graph(files[0], files[1], grammar=files[2])
    assert best_path(graph, np.log(np.full((2, 2), 0.5))) is None
    assert best_path(graph, np.log(np.full((3, 2), 0.5)))[1] == (1, 1)


# Language models


def back_off(model, begin, sentence):
    """Natural logarithm of a sentence's probability by the definition of back-off; ``model``: words -> (log10, bow)."""

    def word_given(history, word):
        if (*history, word) in model:
            return model[*history, word][0]
        return model.get(history, (0.0, 0.0))[1] + word_given(history[1:], word)

    order = max(map(len, model))
    total, history = 0.0, (begin,)
    for word in (*sentence, "</s>"):
        history = history[max(0, len(history) - order + 1) :] if order > 1 else ()
        total += word_given(history, word)
        history = (*history, word)
    return total * math.log(10)


def arpa_text(model):
    order = max(map(len, model))
    lines = ["made for a test", "\\data\\"]
    lines += [f"ngram {n}={sum(len(words) == n for words in model)}" for n in range(1, order + 1)]
    for n in range(1, order + 1):
        lines += ["", f"\\{n}-grams:"]
        for words, (log_prob, bow) in model.items():
            if len(words) == n:
                lines.append(f"{log_prob}\t{' '.join(words)}" + (f"\t{bow}" if n < order and bow else ""))
    return "\n".join([*lines, "", "\\end\\", ""])


@st.composite
def models(draw):
    """A back-off model of up to three orders over two words, some n-grams missing, histories always present."""
    value = st.integers(-30, -1).map(lambda tenths: tenths / 10)
    model = {(word,): (draw(value), draw(st.integers(-10, 5)) / 10) for word in ("<s>", "a", "b", "</s>")}
    for order in range(2, draw(st.integers(1, 3)) + 1):
        histories = [words for words in list(model) if len(words) == order - 1 and words[-1] != "</s>"]
        for history in histories:
            for word in draw(st.sets(st.sampled_from(["a", "b", "</s>"]))):
                model[*history, word] = (draw(value), draw(st.integers(-10, 5)) / 10)
    return model


@settings(max_examples=60, deadline=None)
@given(models(), st.lists(st.lists(st.sampled_from(["a", "b"]), max_size=4), min_size=1, max_size=3))
def test_a_back_off_model_gives_sentences_their_probability(tmp_path_factory, model, sentences):
    path = tmp_path_factory.mktemp("arpa") / "model.arpa"
    path.write_text(arpa_text(model))
    ids = {"a": 1, "b": 2}
    back = 9
    grammar = grammar_from_arpa(read_arpa(path, ids), back)
    arcs = {}
    for source, label, dest, cost in zip(grammar.source, grammar.ilabel, grammar.dest, grammar.cost, strict=True):
        assert (source, label) not in arcs
        arcs[source, label] = (dest, cost)
    for sentence in sentences:
        state, cost = grammar.start, 0.0
        for word in sentence:
            while (state, ids[word]) not in arcs:
                state, more = arcs[state, back]
                cost += more
            state, more = arcs[state, ids[word]]
            cost += more
        while grammar.final[state] == np.inf:
            state, more = arcs[state, back]
            cost += more
        assert -(cost + grammar.final[state]) == pytest.approx(back_off(model, "<s>", sentence), abs=1e-4)


def test_a_large_random_model_is_read_compressed_as_well(tmp_path):
    random.seed(3)
    words = [f"w{number}" for number in range(50)]
    model = {(word,): (-random.random(), -0.1) for word in ("<s>", "</s>", *words)}
    model |= {(a, b): (-random.random(), 0.0) for a in words for b in random.sample(words, 5)}
    (tmp_path / "model.arpa").write_text(arpa_text(model))
    with gzip.open(tmp_path / "model.arpa.gz", "wt") as file:
        file.write(arpa_text(model))
    ids = {word: number for number, word in enumerate(words, start=1)}
    plain, zipped = (grammar_from_arpa(read_arpa(tmp_path / name, ids), 99) for name in ("model.arpa", "model.arpa.gz"))
    assert plain.num_arcs == zipped.num_arcs == 50 + 250 + 51
    np.testing.assert_array_equal(plain.cost, zipped.cost)


UNIGRAMS = {("<s>",): (-99.0, -0.5), ("</s>",): (-0.3, 0.0), ("a",): (-0.5, -0.2), ("b",): (-0.6, 0.0)}


@pytest.mark.parametrize(
    ("change", "line", "reason"),
    [
        (lambda text: text.replace("\ta\t", "\tc\t"), 8, "'c' has no pronunciation in the lexicon.*--skip-unknown"),
        (
            lambda text: text.replace("-0.6\tb", "-0.6\tb -0.1 -0.2"),
            9,
            r"expected a probability, 1 words.*or \\2-grams",
        ),
        (lambda text: text.replace("-0.6\tb", "x\tb"), 9, "not a number"),
        (lambda text: text.replace("-0.6\tb", "nan\tb"), 9, "not a number"),
        (lambda text: text.replace("ngram 1=4", "ngram 1=5"), None, "4 1-grams, its header says 5"),
        (lambda text: text.replace("ngram 1=4", "ngram 2=4"), 3, "expected 'ngram 1=COUNT'"),
        (lambda text: text.replace("\\end\\", ""), None, r"ends before \\end\\"),
        (lambda text: text.split("\\2-grams")[0], None, r"ends before \\2-grams:"),
        (lambda text: "nothing\n", None, "no language model in ARPA form"),
        (lambda text: text.replace("-0.6\tb", "-0.6\ta"), 9, "an n-gram that the file has already"),
        (lambda text: text.replace("-0.3\t</s>", "-0.3\tb").replace("-0.6\tb", "-0.6\t<s>"), 9, "has already"),
    ],
)
def test_damaged_language_models_are_refused_with_the_line(tmp_path, change, line, reason):
    path = tmp_path / "model.arpa"
    path.write_text(change(arpa_text({**UNIGRAMS, ("a", "b"): (-0.1, 0.0)})))
    with pytest.raises(GraphError, match=reason) as caught:
        grammar_from_arpa(read_arpa(path, {"a": 1, "b": 2}), 9)
    if line is not None:
        assert f"line {caught.value.offset}" in str(caught.value)


def test_a_model_whose_sentences_cannot_end_is_refused(tmp_path):
    path = tmp_path / "model.arpa"
    path.write_text(arpa_text({words: value for words, value in UNIGRAMS.items() if words != ("</s>",)}))
    with pytest.raises(GraphError, match="no </s>"):
        grammar_from_arpa(read_arpa(path, {"a": 1, "b": 2}), 9)


def test_an_ngram_without_its_history_is_refused(tmp_path):
    path = tmp_path / "model.arpa"
    path.write_text(arpa_text({**UNIGRAMS, ("a", "b"): (-0.1, 0.0), ("b", "a", "a"): (-0.1, 0.0)}))
    with pytest.raises(GraphError, match=r"line 17: a 3-gram whose first 2 words are no n-gram"):
        grammar_from_arpa(read_arpa(path, {"a": 1, "b": 2}), 9)


def test_unknown_words_can_be_left_out(tmp_path):
    path = tmp_path / "model.arpa"
    path.write_text(arpa_text({**UNIGRAMS, ("a", "b"): (-0.1, 0.0), ("a", "a"): (-0.2, 0.0)}))
    model = read_arpa(path, {"a": 1}, skip_unknown=True)
    assert model.skipped == 2
    assert [len(each.words) for each in model.orders] == [3, 1]


@pytest.mark.parametrize("unknown", ["<unk>", "<UNK>"])
def test_the_class_of_unknown_words_is_left_out(tmp_path, unknown):
    path = tmp_path / "model.arpa"
    path.write_text(arpa_text({**UNIGRAMS, (unknown,): (-2.0, 0.0), ("a", unknown): (-0.2, 0.0)}))
    model = read_arpa(path, {"a": 1, "b": 2})
    assert model.skipped == 2
    assert [len(each.words) for each in model.orders] == [4, 0]
    assert [len(each.words) for each in read_arpa(path, {"a": 1, "b": 2, unknown: 3}).orders] == [5, 1]


# Lexicons and grammars


TOKENS = SymbolTable.of(["<blk>", "x", "y"])


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a x\nb z\n", 2, "token 'z' of 'b' is not in the table of tokens"),
        ("a x\n\nb\n", 3, "'b' has no tokens"),
        ("a #1\n", 1, "'a' has no tokens"),
        ("a x <blk>\n", 1, "'a' is spelled with the blank"),
        ("<eps> x\n", 1, "'<eps>' cannot be a word"),
        ("a x\n#0 y\n", 2, "'#0' cannot be a word"),
        ("", None, "has no words"),
    ],
)
def test_lexicons_that_do_not_fit_are_refused_with_the_line(written, text, line, reason):
    (path,) = written(lexicon=text)
    with pytest.raises(GraphError, match=reason) as caught:
        read_lexicon(path, TOKENS)
    assert caught.value.offset == line


def test_a_word_without_an_id_is_refused(written):
    (path,) = written(lexicon="a x\nb y\n")
    with pytest.raises(GraphError, match="line 2: 'b' is not in the table of words"):
        read_lexicon(path, TOKENS, SymbolTable.of(["<eps>", "a"]))


def test_disambiguation_symbols_of_the_file_are_worked_out_anew(written):
    first, second = written(plain="a x\nb x y\n", marked="a x #1\nb x y\n")
    plain, marked = read_lexicon(first, TOKENS).transducer(), read_lexicon(second, TOKENS).transducer()
    for name in ("source", "dest", "ilabel", "olabel"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(marked, name))
    # Labels: x 2, y 3, #0 4, #1 5.
    assert sorted(plain.ilabel.tolist()) == [2, 2, 3, 4, 5]


def test_grammars_name_their_words(written):
    lexicon, sentences, named = written(lexicon="7 x\n8 y\n", sentences="7 8\n", named="0 1 7 7 0.5\n1 2 8 8\n2\n")
    transducer = named.rename(named.with_name("named.fst.txt"))
    words = read_lexicon(lexicon, TOKENS)
    assert read_grammar(sentences, words).ilabel.tolist() == [1, 2]
    assert read_grammar(transducer, words).ilabel.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("grammar.txt", "a\nb c\n", "line 2: 'c' has no pronunciation"),
        ("grammar.txt", "a\nB\n", "line 2: 'B' has no pronunciation.* Did you mean 'b'"),
        ("grammar.fst.txt", "0 1 1 1\n1\n", "line 1: no symbol '1'.* Numbers are word ids .*--words"),
        ("grammar.txt", "# nothing\n", "has no sentences"),
        ("grammar.fst.txt", "0 1 a a\n1 2 c c\n2\n", "line 2: no symbol 'c'"),
        ("grammar.fst.txt", "0 1 a a\n1 2 <unk> <unk>\n2\n", "line 2: no symbol '<unk>'"),
    ],
)
def test_grammars_with_unknown_words_are_refused(written, tmp_path, name, text, reason):
    (lexicon,) = written(lexicon="a x\nb y\n")
    (tmp_path / name).write_text(text)
    with pytest.raises(GraphError, match=reason):
        read_grammar(tmp_path / name, read_lexicon(lexicon, TOKENS))


def test_a_numbered_word_without_pronunciation_is_refused(tmp_path):
    lexicon = read_lexicon(DATA / "lexicon.txt", read_symbols(DATA / "tokens.txt"), read_symbols(DATA / "words.txt"))
    path = tmp_path / "G.fst.txt"
    path.write_text("0 1 4 4 1.5\n1 2 3 3 0.5\n2\n")
    with pytest.raises(GraphError, match="line 2: '<UNK>' has no pronunciation"):
        read_grammar(path, lexicon)
    with pytest.raises(GraphError, match="repeat belongs to lists"):
        read_grammar(path, lexicon, repeat=True)


def test_a_binary_grammar_needs_word_ids(tmp_path):
    machine = kaldifst.compile((DATA / "G_4digits.fst.txt").read_text().replace(" ", "\t"))
    machine.write(str(tmp_path / "G.fst"))
    tokens = read_symbols(DATA / "tokens.txt")
    with pytest.raises(GraphError, match="--words"):
        read_grammar(tmp_path / "G.fst", read_lexicon(DATA / "lexicon.txt", tokens))
    graph = build_graph(**FIXTURE, grammar=tmp_path / "G.fst")
    assert (graph.num_states, graph.num_arcs) == (118, 572)


def test_exactly_one_grammar_is_needed():
    for grammar in ({}, {"arpa": DATA / "G_2_gram.arpa", "grammar": DATA / "G_4digits.fst.txt"}):
        with pytest.raises(GraphError, match="exactly one"):
            build_graph(**FIXTURE, **grammar)


def test_a_grammar_without_any_sentence_is_refused(tmp_path):
    (tmp_path / "G.fst.txt").write_text("0 1 4 4 0.5\n2 0.5\n")
    with pytest.raises(GraphError, match="nothing to decode"):
        build_graph(**FIXTURE, grammar=tmp_path / "G.fst.txt")
