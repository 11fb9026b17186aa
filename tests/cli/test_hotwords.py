"""``oasr transcribe --hotword`` and ``--hotwords-file``: notation, refusals, and what reaches the decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from oasr_core.cli.hotwords import collect_hotwords
from oasr_core.cli.transcribe import app
from oasr_core.errors import ConfigError


@pytest.fixture
def oasr_transcribe(wenet_digits: Path):
    """Runs ``oasr transcribe`` on the trained digits checkpoint in fp32."""

    def run(*arguments: str | Path):
        fixed = ["--model", str(wenet_digits), "--device", "cpu", "--dtype", "float32"]
        return CliRunner().invoke(app, [*map(str, arguments), *fixed])

    return run


@pytest.fixture
def recording(wenet_digits: Path) -> tuple[Path, str]:
    """A recording and what is said in it."""
    lines = (wenet_digits / "test_wavs" / "text").read_text().splitlines()
    return wenet_digits / "test_wavs" / "utt11_5d.wav", dict(line.split("\t") for line in lines)["utt11_5d"]


def test_hotwords_of_the_file_come_before_those_of_the_flags(tmp_path: Path):
    file = tmp_path / "words.txt"
    file.write_text("\ufeff# names\n\nNEW YORK=2.5\n  # indented\n ZOË \nx=y=-1\r\n", encoding="utf-8")
    hotwords = collect_hotwords(file, ["SIX", "NEW YORK = 3", "NINE=-2e1"])
    assert [(word.phrase, word.boost) for word in hotwords] == [
        ("NEW YORK", 2.5),
        ("ZOË", None),
        ("x=y", -1.0),
        ("SIX", None),
        ("NEW YORK", 3.0),
        ("NINE", -20.0),
    ]
    assert collect_hotwords(None, []) == ()


@pytest.mark.parametrize("text", ["", " ", "=2", "SIX=", "SIX=much", "SIX=nan", "SIX=inf", "a=b"])
def test_what_is_no_hotword_is_refused(text: str):
    with pytest.raises(ConfigError, match=r"--hotword: .* is no PHRASE\[=BOOST\]"):
        collect_hotwords(None, [text])


def test_a_bad_hotwords_file_is_named(tmp_path: Path):
    file = tmp_path / "words.txt"
    with pytest.raises(ConfigError, match=r"--hotwords-file .*words.txt: cannot read it: No such file"):
        collect_hotwords(file, [])
    file.write_bytes(b"caf\xe9")
    with pytest.raises(ConfigError, match=r"words.txt: cannot read it: not UTF-8"):
        collect_hotwords(file, [])
    file.write_text("SIX\nSEVEN=high\n")
    with pytest.raises(ConfigError, match=r"words.txt, line 2: 'SEVEN=high' is no PHRASE"):
        collect_hotwords(file, [])


def test_a_bad_hotword_is_a_usage_error():
    result = CliRunner().invoke(app, ["a.wav", "--model", "m", "--hotword", "SIX=high"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--hotword: 'SIX=high' is no PHRASE[=BOOST]" in result.stderr


@pytest.mark.parametrize("mode", ["offline", "streaming"])
def test_hotwords(oasr_transcribe, recording: tuple[Path, str], tmp_path: Path, mode: str):
    file, said = recording
    first = said.split()[0]
    words = tmp_path / "words.txt"
    words.write_text(f"{first}=-1\n")
    result = oasr_transcribe(file, "--mode", mode, "--hotwords-file", words, "--hotword", f"{first}=-30")
    assert (result.exit_code, result.stderr) == (0, "")
    assert first not in result.stdout.split()
    result = oasr_transcribe(file, "--mode", mode, "--hotword", "日本", "--hotword", first)
    assert result.exit_code == 0
    assert result.stderr == "warning: the hotword '日本' has no effect: the model's tokenizer cannot encode it\n"
    assert result.stdout == said + "\n"


def test_greedy_search_refuses_hotwords(oasr_transcribe, recording: tuple[Path, str]):
    result = oasr_transcribe(recording[0], "--hotword", "SIX", "--decode-option", "search=greedy")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "hotwords" in result.stderr
