"""``oasr wfst``: what it prints and writes, and its errors, which are one line each."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from oasr_core.cli.main import main
from oasr_wfst import draw
from oasr_wfst.draw import draw_graph
from oasr_wfst.errors import GraphError
from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs
from oasr_wfst.load import graph_kind, load_graph

DATA = Path(__file__).parent / "data"
TABLES = ["--tokens", str(DATA / "tokens.txt"), "--lexicon", str(DATA / "lexicon.txt")]


@pytest.fixture
def run(capsys):
    """``run(*arguments) -> (exit code, output, errors)``."""

    def call(*arguments):
        code = main(["wfst", *map(str, arguments)])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return call


def test_build_prints_its_stages_and_writes_an_image(run, tmp_path):
    image = tmp_path / "graph.img"
    code, out, err = run("build", *TABLES, "--arpa", DATA / "G_2_gram.arpa", "-o", image)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["STAGE", "STATES", "ARCS", "SECONDS"]
    assert [line.split()[0] for line in lines[1:-1]] == [
        "lexicon", "grammar", "composition", "determinization", "minimization", "ctc",
    ]  # fmt: skip
    assert lines[1].endswith("10 pronunciations")
    assert lines[-1] == f"{image}: 59 states, 342 arcs, 44 columns, {image.stat().st_size / 1e3:.1f} kB"
    assert graph_kind(image) == "image"


def test_build_takes_sentences(run, tmp_path):
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("ONE TWO\nTHREE\n")
    code, out, _ = run(
        "build", *TABLES, "--grammar", sentences, "--repeat", "--remove-epsilons", "-o", tmp_path / "g.img"
    )
    assert code == 0
    assert "epsilon removal" in out
    assert not load_graph(tmp_path / "g.img").has_epsilons


@pytest.mark.parametrize("name", ["HLG.pt", "HLG_G_2_gram.fst", "HLG_G_2_gram.fst.txt"])
def test_build_writes_the_image_of_a_built_graph(run, tmp_path, name):
    image = tmp_path / "graph.img"
    code, out, _ = run("build", "--from", DATA / name, "--words", DATA / "words.txt", "-o", image)
    assert code == 0
    assert out.startswith(f"{image}: ")
    graph = load_graph(image)
    assert graph.num_arcs == load_graph(DATA / name).num_arcs
    assert graph.symbols[9] == "SEVEN"


def test_info_shows_the_sizes(run, tmp_path):
    run("build", *TABLES, "--arpa", DATA / "G_2_gram.arpa", "-o", tmp_path / "graph.img")
    code, out, _ = run("info", tmp_path / "graph.img", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["kind"] == "image"
    assert facts["file bytes"] == (tmp_path / "graph.img").stat().st_size
    expected = {
        "states": 59, "arcs": 342, "epsilon arcs": 21, "final arcs": 31, "most arcs a state": 12, "start state": 0,
        "super-final state": 58, "columns": 44, "words on arcs": 164, "word symbols": 11, "token symbols": 44,
    }  # fmt: skip
    assert {key: facts[key] for key in expected} == expected
    code, out, _ = run("info", DATA / "HLG.pt")
    assert (code, out.splitlines()[1].split()) == (0, ["kind", "k2"])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([*TABLES], "either --arpa or --grammar"),
        ([*TABLES, "--arpa", "a", "--grammar", "b"], "either --arpa or --grammar"),
        (["--arpa", "a"], "--tokens, --lexicon"),
        (["--from", "x", "--arpa", "a", "--repeat"], "--arpa, --repeat cannot be used with a graph that is built"),
        ([*TABLES, "--arpa", "a", "--repeat"], "--repeat cannot be used with --arpa"),
        ([*TABLES, "--grammar", "a", "--skip-unknown"], "--skip-unknown cannot be used with --grammar"),
        ([*TABLES, "--arpa", "a", "--label-offset", "1"], "--label-offset cannot be used with building"),
        ([*TABLES, "--arpa", "missing.arpa"], "missing.arpa cannot be read"),
        (["--from", "missing.pt"], "missing.pt cannot be read"),
    ],
)
def test_build_refuses_what_does_not_fit(run, tmp_path, arguments, reason):
    code, _, err = run("build", *arguments, "-o", tmp_path / "graph.img")
    assert code == 2
    assert err.startswith("error: ")
    assert reason in err
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named_before_the_work(run, tmp_path):
    code, out, err = run("build", *TABLES, "--arpa", DATA / "G_2_gram.arpa", "-o", tmp_path / "none" / "g.img")
    assert (code, out) == (2, "")
    assert f"there is no directory {tmp_path / 'none'}" in err


@pytest.mark.parametrize("command", ["build", "info", "draw"])
def test_the_list_of_commands_cuts_no_summary(run, command):
    _, out, _ = run("--help")
    (line,) = [line for line in out.splitlines() if line.split()[:1] == [command]]
    assert not line.endswith("...")


def test_files_that_do_not_fit_are_named_with_the_line(run, tmp_path):
    lexicon = tmp_path / "lexicon.txt"
    lexicon.write_text("ONE ▁ON E\n")
    code, _, err = run(
        "build", "--tokens", DATA / "tokens.txt", "--lexicon", lexicon, "--arpa", DATA / "G_2_gram.arpa",
        "-o", tmp_path / "graph.img",
    )  # fmt: skip
    assert code == 2
    assert f"{lexicon}, line 1: token '▁ON' of 'ONE' is not in the table of tokens" in err
    lexicon.write_text("ONE ▁ O NE\n")
    code, _, err = run(
        "build", "--tokens", DATA / "tokens.txt", "--lexicon", lexicon, "--arpa", DATA / "G_2_gram.arpa",
        "-o", tmp_path / "graph.img",
    )  # fmt: skip
    assert (code, "line 8: 'EIGHT' has no pronunciation in the lexicon" in err) == (2, True)


@pytest.mark.parametrize("command", [["info"], ["draw", "-o", "x.dot"]])
def test_damaged_graphs_are_refused(run, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "graph.img").write_bytes(b"OASRWFST" + bytes(100))
    code, _, err = run(command[0], tmp_path / "graph.img", *command[1:])
    assert (code, "ends inside of its header" in err) == (2, True)


# Pictures


@pytest.fixture
def small():
    arcs = [(0, 1, 1, -0.5, (1, 2)), (0, 0, 0, 0.0, ()), (1, 0, EPSILON, -1.0, ()), (1, 2, FINAL, 0.0, ())]
    return graph_from_arcs(arcs, 3, symbols=["<eps>", 'say "x"', "b"], tokens=["<blk>", "a\\"])


def test_dot_text_names_states_tokens_words_and_scores(small, tmp_path):
    draw_graph(small, tmp_path / "graph.dot")
    assert (tmp_path / "graph.dot").read_text().splitlines()[3:] == [
        "  0 [style = bold];",
        "  2 [shape = doublecircle];",
        r'  0 -> 1 [label = "a\\:say \"x\" b/-0.5"];',
        '  0 -> 0 [label = "<blk>"];',
        '  1 -> 0 [label = "<eps>/-1"];',
        '  1 -> 2 [label = "<final>"];',
        "}",
    ]


def test_labels_and_words_without_symbols_are_numbers(tmp_path):
    draw_graph(load_graph(DATA / "HLG.pt"), tmp_path / "graph.dot")
    assert '  0 -> 5 [label = "5:' in (tmp_path / "graph.dot").read_text()


def test_large_graphs_are_not_drawn(run, tmp_path):
    code, _, err = run("draw", DATA / "HLG.pt", "-o", tmp_path / "x.dot", "--max-arcs", 300)
    assert (code, "the graph has 315 arcs, pictures are drawn up to 300" in err) == (2, True)
    assert not (tmp_path / "x.dot").exists()
    code, out, _ = run("draw", DATA / "HLG.pt", "-o", tmp_path / "x.dot")
    assert (code, out.strip()) == (0, str(tmp_path / "x.dot"))


def test_pictures_need_the_program_dot(small, tmp_path, monkeypatch):
    monkeypatch.setattr(draw.shutil, "which", lambda name: None)
    with pytest.raises(GraphError, match=r"'dot' that draws \.svg is not installed.*graph\.dot"):
        draw_graph(small, tmp_path / "graph.svg")
    with pytest.raises(GraphError, match=r"written as \.dot, \.svg"):
        draw_graph(small, tmp_path / "graph.jpg")


def test_the_program_dot_gets_the_text(small, tmp_path, monkeypatch):
    calls = []

    def fake(command, **options):
        calls.append((command, options["input"].decode()))

    monkeypatch.setattr(draw.shutil, "which", lambda name: "/usr/bin/dot")
    monkeypatch.setattr(draw.subprocess, "run", fake)
    draw_graph(small, tmp_path / "graph.svg")
    assert calls[0][0] == ["/usr/bin/dot", "-Tsvg", "-o", str(tmp_path / "graph.svg")]
    assert calls[0][1].startswith("digraph")

    def fail(command, **options):
        raise subprocess.CalledProcessError(1, command, stderr=b"syntax error")

    monkeypatch.setattr(draw.subprocess, "run", fail)
    with pytest.raises(GraphError, match="'dot' failed: syntax error"):
        draw_graph(small, tmp_path / "graph.png")


def test_a_picture_that_cannot_be_written_is_an_error(small, tmp_path):
    with pytest.raises(GraphError, match="cannot be written"):
        draw_graph(small, tmp_path / "no" / "graph.dot")
