"""Graphs of k2 and OpenFst: equal contents whatever the file, and typed errors for foreign and damaged files."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import kaldifst
import numpy as np
import pytest
import torch

from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, FINAL
from oasr_wfst.load import graph_kind, load_graph
from oasr_wfst.openfst_format import read_openfst, write_openfst

DATA = Path(__file__).parent / "data"
ARRAYS = ("arc_begin", "dest", "label", "score", "word_begin", "words")


def arcs_of(graph):
    """``(source, dest, label, score, words)`` of each arc."""
    sources = np.repeat(np.arange(graph.num_states), np.diff(graph.arc_begin))
    return [
        (
            int(sources[arc]),
            int(graph.dest[arc]),
            int(graph.label[arc]),
            float(graph.score[arc]),
            graph.words[graph.word_begin[arc] : graph.word_begin[arc + 1]].tolist(),
        )
        for arc in range(graph.num_arcs)
    ]


def without_states(graph):
    """What two graphs share that differ only in the numbers of their states."""
    return sorted((label, round(score, 4), words) for _, _, label, score, words in arcs_of(graph))


def assert_same_arrays(graph, other):
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(graph, name), getattr(other, name))


# k2


def test_a_k2_graph_has_the_arcs_of_its_file():
    graph = load_graph(DATA / "HLG.pt", words=DATA / "words.txt", tokens=DATA / "tokens.txt")
    expected = json.loads((DATA / "HLG_k2.json").read_text())
    assert graph.num_states == expected["num_states"]
    words = [[word for word in each if word > 0] for each in expected["aux_labels"]]
    wanted = [(*arc, each) for arc, each in zip(expected["arcs"], words, strict=True)]
    assert arcs_of(graph) == [(s, d, label, pytest.approx(score), each) for s, d, label, score, each in wanted]
    assert (graph.has_epsilons, graph.num_columns, graph.symbols[6], graph.tokens[0]) == (False, 44, "FOUR", "<blk>")


def test_plain_and_ragged_words_are_the_same_graph():
    assert_same_arrays(load_graph(DATA / "HLG_4digits.pt"), load_graph(DATA / "HLG_4digits_plain_aux.pt"))


def small_k2(**changed):
    scores = torch.tensor([-0.5, 0.0, -1.0]).view(torch.int32)
    arcs = torch.tensor([[0, 1, 3], [1, 1, 0], [1, 2, -1]], dtype=torch.int32)
    content = {"arcs": torch.cat([arcs, scores[:, None]], dim=1), "aux_labels": torch.tensor([7, 0, -1]).int()}
    return {**content, **changed}


def test_other_keys_and_other_strides_do_no_harm(tmp_path):
    path = tmp_path / "HLG.pt"
    arcs = small_k2()["arcs"].t().contiguous().t()
    torch.save(small_k2(arcs=arcs, tokens=torch.zeros(3).int(), lm_scores=torch.zeros(3)), path)
    wanted = [(0, 1, 3, -0.5, [7]), (1, 1, 0, 0.0, []), (1, 2, FINAL, -1.0, [])]
    assert arcs_of(load_graph(path)) == wanted


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"arcs": torch.zeros(12, dtype=torch.int32)}, "FsaVec"),
        ({"arcs": torch.zeros(3, 4, dtype=torch.int64)}, r"'arcs' is int64 \(3, 4\)"),
        ({"arcs": [1, 2]}, "'arcs' is list"),
        ({"arcs": torch.tensor([[0, 1, -4, 0]], dtype=torch.int32)}, "arc 0 has the label -4"),
        ({"aux_labels": torch.zeros(2, dtype=torch.int32)}, "one entry for each of the 3 arcs"),
        ({"aux_labels": torch.zeros(3)}, "whole numbers"),
        ({"aux_labels": {}}, "'aux_labels' is dict"),
        ({"aux_labels": torch.tensor([-7, 0, 0]).int()}, "word ids start at 1"),
        ({"arcs": torch.zeros(0, 4, dtype=torch.int32), "aux_labels": torch.zeros(0).int()}, "0 states|1 states"),
    ],
)
def test_other_contents_of_k2_files_are_refused(tmp_path, changed, reason):
    torch.save(small_k2(**changed), tmp_path / "HLG.pt")
    with pytest.raises(GraphError, match=reason):
        load_graph(tmp_path / "HLG.pt")


def test_files_that_are_no_graphs_of_k2_are_refused(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"model": {"weight": torch.zeros(2)}}, path)
    with pytest.raises(GraphError, match=r"no 'arcs' and 'aux_labels' \(found: \['model'\]\)"):
        load_graph(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("something", "else")
    with pytest.raises(GraphError, match=r"without a data\.pkl"):
        load_graph(path)


class _Runs:
    """Pickles as a call of any function, which reading must not make."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("function", [os.mkdir, eval, print, getattr])
def test_nothing_in_a_k2_file_is_executed(tmp_path, function):
    witness = tmp_path / "witness"
    arguments = {"eval": f"__import__('os').mkdir({str(witness)!r})"}.get(function.__name__, str(witness))
    path = tmp_path / "HLG.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        hostile = {"arcs": _Runs(function, arguments), "aux_labels": 0}
        archive.writestr("HLG/data.pkl", pickle.dumps(hostile, protocol=2))
    with pytest.raises(GraphError, match=r"asks for .*, which is not a tensor"):
        load_graph(path)
    assert not witness.exists()


def test_a_k2_file_that_is_cut_anywhere_is_refused(tmp_path):
    data = (DATA / "HLG.pt").read_bytes()
    path = tmp_path / "HLG.pt"
    for size in range(4, len(data), 211):
        path.write_bytes(data[:size])
        with pytest.raises(GraphError):
            load_graph(path)


def test_a_k2_file_with_changed_bytes_loads_or_is_refused(tmp_path):
    data = (DATA / "HLG.pt").read_bytes()
    path = tmp_path / "HLG.pt"
    refused = 0
    for offset in range(4, len(data), 83):
        damaged = bytearray(data)
        damaged[offset] ^= 0x55
        path.write_bytes(bytes(damaged))
        try:
            load_graph(path)
        except GraphError:
            refused += 1
    assert refused > 10


def test_a_tensor_larger_than_its_storage_is_refused(tmp_path):
    path = tmp_path / "HLG.pt"
    torch.save(small_k2(), path)
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content[:16] if name.endswith("data/0") else content)
    with pytest.raises(GraphError, match="a tensor of 12 elements in a storage of 4"):
        load_graph(path)


# OpenFst


@pytest.mark.parametrize("name", ["HLG_G_2_gram", "HLG_G_4digits"])
def test_an_openfst_graph_agrees_with_openfst_itself(name):
    graph = load_graph(DATA / f"{name}.fst", words=DATA / "words.txt", tokens=DATA / "tokens.txt")
    machine = kaldifst.StdVectorFst.read(str(DATA / f"{name}.fst"))
    wanted = []
    for state in range(machine.num_states):
        for arc in kaldifst.ArcIterator(machine, state):
            label = EPSILON if arc.ilabel == 0 else arc.ilabel - 1
            wanted.append((state, arc.nextstate, label, -arc.weight.value, [arc.olabel] if arc.olabel else []))
        if machine.final(state).value != np.inf:
            wanted.append((state, machine.num_states, FINAL, -machine.final(state).value, []))
    assert arcs_of(graph) == wanted
    assert graph.tokens[7] == "▁S"


def test_the_epsilon_free_graph_of_openfst_is_that_of_k2():
    graph = load_graph(DATA / "HLG_G_4digits.fst")
    assert without_states(graph) == without_states(load_graph(DATA / "HLG_4digits.pt"))


def test_text_and_binary_are_the_same_graph_but_for_the_numbers_of_states():
    text, binary = load_graph(DATA / "HLG_G_2_gram.fst.txt"), load_graph(DATA / "HLG_G_2_gram.fst")
    assert without_states(text) == without_states(binary)
    assert text.epsilon_count.sum() == 21


def test_a_const_transducer_is_the_same_graph(tmp_path):
    constant = kaldifst.StdConstFst(kaldifst.StdVectorFst.read(str(DATA / "HLG_G_2_gram.fst")))
    constant.write(str(tmp_path / "const.fst"))
    assert constant.type == "const"
    assert_same_arrays(load_graph(tmp_path / "const.fst"), load_graph(DATA / "HLG_G_2_gram.fst"))


def test_log_arcs_are_read_as_they_are(tmp_path):
    data = (DATA / "HLG_G_2_gram.fst").read_bytes().replace(b"\x08\0\0\0standard", b"\x03\0\0\0log", 1)
    (tmp_path / "log.fst").write_bytes(data)
    assert_same_arrays(load_graph(tmp_path / "log.fst"), load_graph(DATA / "HLG_G_2_gram.fst"))


def test_written_transducers_are_what_openfst_reads(tmp_path):
    write_openfst(read_openfst(DATA / "HLG_G_2_gram.fst"), tmp_path / "again.fst")
    again = kaldifst.StdVectorFst.read(str(tmp_path / "again.fst"))
    assert again.to_str() == kaldifst.StdVectorFst.read(str(DATA / "HLG_G_2_gram.fst")).to_str()


def test_symbols_of_the_file_are_used(tmp_path):
    tokens = kaldifst.SymbolTable.from_str("<eps> 0\n<blk> 1\na 2\n")
    words = kaldifst.SymbolTable.from_str("<eps> 0\nhello 1\n")
    machine = kaldifst.compile(
        "0 1 a hello 1.5\n1 2\n", isymbols=tokens, osymbols=words, keep_isymbols=True, keep_osymbols=True
    )
    machine.write(str(tmp_path / "named.fst"))
    graph = load_graph(tmp_path / "named.fst")
    assert arcs_of(graph) == [(0, 1, 1, -1.5, [1]), (1, 2, FINAL, -2.0, [])]
    assert (list(graph.tokens), list(graph.symbols)) == (["<blk>", "a"], ["<eps>", "hello"])


def test_the_start_comes_first_and_infinite_costs_are_left_out(tmp_path):
    path = tmp_path / "graph.fst.txt"
    path.write_text("2 0 2 4 0.5\n2 1 3 0 Infinity\n0 1 0 5\n1 0.25\n")
    assert arcs_of(load_graph(path)) == [(0, 2, 1, -0.5, [4]), (1, 3, FINAL, -0.25, []), (2, 1, EPSILON, 0.0, [5])]


def test_a_cut_or_changed_openfst_file_is_refused_or_another_graph(tmp_path):
    path = tmp_path / "graph.fst"
    constant = kaldifst.StdConstFst(kaldifst.StdVectorFst.read(str(DATA / "HLG_G_2_gram.fst")))
    constant.write(str(tmp_path / "const.fst"))
    for data in ((DATA / "HLG_G_2_gram.fst").read_bytes(), (tmp_path / "const.fst").read_bytes()):
        for size in range(4, len(data), 131):
            path.write_bytes(data[:size])
            with pytest.raises(GraphError) as caught:
                load_graph(path)
            assert str(path) in str(caught.value)
        for offset in range(4, len(data), 97):
            damaged = bytearray(data)
            damaged[offset] ^= 0x90
            path.write_bytes(bytes(damaged))
            try:
                load_graph(path)
            except GraphError:
                continue


@pytest.mark.parametrize(("old", "new"), [(b"standard", b"log64xyz"), (b"vector", b"ngrams")])
def test_other_kinds_of_openfst_files_are_refused(tmp_path, old, new):
    path = tmp_path / "graph.fst"
    path.write_bytes((DATA / "HLG_G_2_gram.fst").read_bytes().replace(old, new, 1))
    with pytest.raises(GraphError, match=r"byte \d+: a .* transducer with .* arcs.*fstconvert") as caught:
        load_graph(path)
    assert caught.value.offset is not None


def test_a_transducer_without_a_start_is_refused(tmp_path):
    path = tmp_path / "empty.fst"
    kaldifst.StdVectorFst().write(str(path))
    with pytest.raises(GraphError, match="accepts nothing"):
        load_graph(path)


# Text with symbols, as a TLG of WeNet is printed with its tables


@pytest.fixture
def tlg(tmp_path):
    """A graph with epsilons, its labels named; tables of tokens (``<eps>`` first) and words."""
    (tmp_path / "tokens.txt").write_text("<eps> 0\n<blank> 1\n<unk> 2\n好 3\n7 4\n", encoding="utf-8")
    (tmp_path / "words.txt").write_text("<eps> 0\n好 1\n7 2\n", encoding="utf-8")
    lines = ["0 0 <blank> <eps>", "0 1 好 好 0.5", "1 0 <eps> <eps> 0.25", "1 2 7 7 1.5", "2"]
    (tmp_path / "TLG.fst.txt").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path


def test_named_labels_are_looked_up(tlg):
    graph = load_graph(tlg / "TLG.fst.txt", words=tlg / "words.txt", tokens=tlg / "tokens.txt")
    assert arcs_of(graph) == [
        (0, 0, 0, 0.0, []),
        (0, 1, 2, -0.5, [1]),
        (1, 0, EPSILON, -0.25, []),
        (1, 2, 3, -1.5, [2]),
        (2, 3, FINAL, 0.0, []),
    ]
    assert list(graph.tokens) == ["<blank>", "<unk>", "好", "7"]


def test_a_table_of_the_model_serves_as_well(tlg):
    (tlg / "units.txt").write_text("<blank> 0\n<unk> 1\n好 2\n7 3\n", encoding="utf-8")
    graph = load_graph(tlg / "TLG.fst.txt", words=tlg / "words.txt", tokens=tlg / "units.txt")
    assert_same_arrays(graph, load_graph(tlg / "TLG.fst.txt", words=tlg / "words.txt", tokens=tlg / "tokens.txt"))
    assert list(graph.tokens) == ["<blank>", "<unk>", "好", "7"]


def test_named_labels_need_their_tables(tlg):
    with pytest.raises(GraphError, match="give the table of tokens and that of words"):
        load_graph(tlg / "TLG.fst.txt")
    (tlg / "words.txt").write_text("<eps> 0\n7 2\n", encoding="utf-8")
    with pytest.raises(GraphError, match="line 2: no symbol '好' in the table"):
        load_graph(tlg / "TLG.fst.txt", words=tlg / "words.txt", tokens=tlg / "tokens.txt")


def test_the_label_offset_is_what_column_0_has(tmp_path):
    path = tmp_path / "graph.fst.txt"
    path.write_text("0 1 3 1 0.5\n1\n")
    assert arcs_of(load_graph(path, label_offset=3))[0][2] == 0
    assert arcs_of(load_graph(path))[0][2] == 2
    with pytest.raises(GraphError, match="arc 0 has the input label 3, with label_offset 4 no column"):
        load_graph(path, label_offset=4)
    with pytest.raises(GraphError, match="belongs to OpenFst files"):
        load_graph(DATA / "HLG.pt", label_offset=1)


def test_an_acceptor_gives_its_labels_as_words(tmp_path):
    path = tmp_path / "graph.fst.txt"
    for text in ("0 1 3 0.5\n1 2 4 0.25\n2 0.125\n", "0 1 3 0.5\n1 2 4\n2\n"):
        path.write_text(text)
        assert arcs_of(load_graph(path))[0][2:] == (2, -0.5, [3])


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("0 1 2 3 0.5\n0 1 2 3 x\n", 2, "could not convert"),
        ("0 1 2 3 0.5\n0 -1 2 3\n", 2, "'-1' is no state"),
        ("0 1 2 3 0.5\n0 1 2 3 4 5\n", 2, "6 fields"),
        ("0 1 2 3 0.5\n1 nan\n", 2, "nan is no cost"),
        ("0 1 2 3 -inf\n1\n", 1, "-inf is no cost"),
        ("0 1 2 99999999999 1\n1\n", 1, "expected 'source dest input output"),
        ("0 99999999 2 3 0.5\n1\n", None, "state 99999999 occurs"),
    ],
)
def test_damaged_text_is_refused_with_the_line(tmp_path, text, line, reason):
    path = tmp_path / "graph.fst.txt"
    path.write_text(text)
    with pytest.raises(GraphError, match=reason) as caught:
        load_graph(path)
    assert caught.value.offset == line


# Recognition


@pytest.mark.parametrize(
    ("name", "kind"),
    [("HLG.pt", "k2"), ("HLG_G_2_gram.fst", "openfst"), ("HLG_G_2_gram.fst.txt", "openfst text")],
)
def test_the_kind_is_told_by_the_content(tmp_path, name, kind):
    copy = tmp_path / "graph"
    copy.write_bytes((DATA / name).read_bytes())
    assert graph_kind(copy) == kind
    assert load_graph(copy).num_arcs > 300


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"", "is empty"),
        (b"<blk> 0\n<unk> 1\n", "none of"),
        (pickle.dumps({}), "torch before 1.6"),
        (b"\x89PNG\r\n", "none of"),
    ],
)
def test_foreign_files_are_refused(tmp_path, content, reason):
    (tmp_path / "graph").write_bytes(content)
    with pytest.raises(GraphError, match=reason):
        load_graph(tmp_path / "graph")


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "missing.img", tmp_path):
        with pytest.raises(GraphError, match="cannot be read"):
            load_graph(path)


def test_legacy_files_of_torch_are_refused(tmp_path):
    buffer = io.BytesIO()
    torch.save(small_k2(), buffer, _use_new_zipfile_serialization=False)
    (tmp_path / "HLG.pt").write_bytes(buffer.getvalue())
    with pytest.raises(GraphError, match="save it again"):
        load_graph(tmp_path / "HLG.pt")
