"""Log records on the command line: one line each, tracebacks only where they are asked for, failures told once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from oasr_core.cli.logs import log_lines
from oasr_core.cli.main import main
from oasr_core.errors import ConfigError
from oasr_core.registry import registry


@pytest.fixture(autouse=True)
def usual_environment(monkeypatch):
    for name in ("OASR_DEBUG", "OASR_LOG"):
        monkeypatch.delenv(name, raising=False)


def log_a_bug():
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        logging.getLogger("oasr_core.somewhere").exception("decoding\n  failed")


def test_an_exception_is_one_line(capsys):
    with log_lines():
        log_a_bug()
    assert capsys.readouterr().err == (
        "error: decoding failed: ZeroDivisionError: a bug (run with OASR_DEBUG=1 for the traceback)\n"
    )


def test_debug_shows_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv("OASR_DEBUG", "1")
    with log_lines():
        log_a_bug()
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "error: decoding failed"
    assert rest[0].startswith("Traceback")
    assert rest[-1] == "ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, ["warning: w", "warning: theirs"]),
        ("error", ["warning: theirs"]),
        ("INFO", ["info: i", "warning: w", "warning: theirs"]),
        ("debug", ["debug: d", "info: i", "warning: w", "warning: theirs"]),
    ],
)
def test_levels_are_those_of_oasr_and_its_plugins(capsys, monkeypatch, level, expected):
    if level:
        monkeypatch.setenv("OASR_LOG", level)
    with log_lines():
        for name in ("oasr_core.x", "oasr_ctc.x"):
            ours = logging.getLogger(name)
            ours.debug("d")
            ours.info("i")
            ours.warning("w")
            logging.getLogger("stranger").info("silent")
            logging.getLogger("stranger").warning("theirs")
            assert capsys.readouterr().err.splitlines() == expected
    logging.getLogger("oasr_core.x").error("afterwards")
    assert capsys.readouterr().err == ""


def test_an_unknown_level_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("OASR_LOG", "loud")
    with pytest.raises(ConfigError, match="OASR_LOG='loud'"), log_lines():
        pass
    assert main(["models"]) == 2
    assert capsys.readouterr().err.startswith("error: OASR_LOG='loud' is no level; allowed: debug, info")


def test_a_failure_in_the_engine_is_told_once(wenet_digits: Path, capsys, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(registry("decode_strategies").get("ctc"), "decode_offline", broken)
    file = next(iter(sorted((wenet_digits / "test_wavs").glob("*.wav"))))
    arguments = ["transcribe", str(file), "--model", str(wenet_digits), "--device", "cpu", "--dtype", "float32"]
    assert main([*arguments, "--decode-option", "search=greedy"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.count("a bug") == 1
    assert stderr.startswith(f"error: {file}: ZeroDivisionError: a bug (stage ")
    assert stderr.endswith(" (run with OASR_DEBUG=1 for the traceback)\n")
    assert main(["--debug", *arguments, "--decode-option", "search=greedy"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_debug_shows_the_traceback_of_what_a_command_reports_itself(capsys):
    assert main(["--debug", "config", "show", "--set", "max_batch_size=0"]) == 2
    assert "Traceback" in capsys.readouterr().err
    assert main(["config", "show", "--set", "max_batch_size=0"]) == 2
    assert "Traceback" not in capsys.readouterr().err
