"""The ``oasr`` group: listing without imports, one command imported, errors without tracebacks, exit codes."""

from __future__ import annotations

import json

import pytest

from oasr_core.cli.main import SUMMARIES, main
from oasr_core.registry import registry
from oasr_core.testing.plugin_env import PluginEnv, tokenizer_source

COMMANDS = '''
import typer
OASR_API = {"commands": "1.0"}
app = typer.Typer(add_completion=False)

@app.command()
def run(kind: str):
    """Do as told."""
    from oasr_core import errors
    if kind == "exit":
        raise typer.Exit(7)
    if kind == "crash":
        raise ZeroDivisionError("a bug")
    raise getattr(errors, kind)("what went wrong")
'''


@pytest.fixture(scope="module")
def env(tmp_path_factory) -> PluginEnv:
    """A good, a broken and two rivalling commands."""
    env = PluginEnv(tmp_path_factory.mktemp("cli"))
    env.add(
        "acme-tool", "3.1", entry_points={"oasr.commands": {"acme": "acme_tool:app"}}, modules={"acme_tool": COMMANDS}
    )
    env.add(
        "acme-bad", entry_points={"oasr.commands": {"bad": "acme_bad:app"}}, modules={"acme_bad": "import nothing_here"}
    )
    env.add("acme-int", entry_points={"oasr.commands": {"int": "acme_int:app"}}, modules={"acme_int": "app = 1"})
    env.add(
        "acme-tok",
        entry_points={"oasr.tokenizers": {"acme": "cli_acme_tok:Tok", "tok": "cli_acme_tok:Tok"}},
        modules={"cli_acme_tok": tokenizer_source() + OPTIONS},
    )
    for owner in ("one", "two"):
        env.add(
            f"rival-{owner}",
            entry_points={"oasr.commands": {"rival": f"rival_{owner}:app"}},
            modules={f"rival_{owner}": COMMANDS},
        )
    return env


OPTIONS = """
from pydantic import BaseModel, Field

class Options(BaseModel):
    beam: int = Field(8, description="Width of the beam.")
    path: str
    scale: float | None = None

Tok.options_cls = Options
"""


def modules_after(env: PluginEnv, *arguments: str) -> tuple[list[str], float]:
    """Top-level modules that a call of the command line imports, and its CPU seconds."""
    code = f"""
import io, json, os, sys
from contextlib import redirect_stdout
from oasr_core.cli.main import main
with redirect_stdout(io.StringIO()):
    assert main({list(arguments)!r}) == 0
times = os.times()
print(json.dumps([sorted({{name.partition(".")[0] for name in sys.modules}}), times.user + times.system]))
"""
    modules, seconds = env.python(code).json()
    return modules, seconds


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"], ["plugins", "list", "--json"]])
def test_listing_imports_no_plugin_and_is_quick(env, arguments):
    # The least of a few runs, against a bare interpreter's start: neighbours on a busy machine slow both down alike.
    for _ in range(6):
        modules, seconds = modules_after(env, *arguments)
        bare = env.python("import json, os; times = os.times(); print(json.dumps(times.user + times.system))").json()
        allowed = max(0.3, 16 * bare)
        if seconds < allowed:
            break
    foreign = {name for name in modules if name.startswith(("acme", "rival", "oasr_"))} - {"oasr_core"}
    assert not foreign
    assert not {"torch", "numpy", "rich"} & set(modules)
    if arguments == ["--help"]:
        assert "pydantic" not in modules
    assert seconds < allowed


def test_help_lists_every_command_with_a_line_even_the_broken_ones(env):
    done = env.cli("--help")
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    for (_, name), summary in SUMMARIES.items():
        assert f"{name} {summary}" in text
    assert "acme (provided by acme-tool 3.1)" in text
    assert "bad (provided by acme-bad 1.0)" in text
    assert "rival (provided by rival-one 1.0) (provided by rival-two 1.0)" in text
    assert done.stderr == ""


def test_there_is_a_summary_for_every_command_of_the_core():
    mine = [entry.name for entry in registry("commands").entries() if entry.distribution == "oasr-core"]
    assert sorted(name for _, name in SUMMARIES) == sorted(mine)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["acme", "exit"], 7, ""),
        (["acme", "ConfigError"], 2, "error: what went wrong\n"),
        (["acme", "CacheGeometryError"], 2, "error: what went wrong\n"),
        (["acme", "UnknownPluginError"], 2, "error: what went wrong\n"),
        (["acme", "CheckpointError"], 2, "error: what went wrong\n"),
        (["acme", "UnknownRequestError"], 1, "error: what went wrong\n"),
        (["acme", "OasrError"], 1, "error: what went wrong\n"),
        (["acme", "--nonsense"], 2, "No such option"),
        (
            ["bad"],
            2,
            "error: commands/bad cannot be loaded: the entry point 'acme_bad:app' of acme-bad 1.0 raised Module",
        ),
        (["int"], 2, "error: commands/int of acme-int 1.0 (acme_int:app) is an instance of int"),
        (["rival"], 2, "error: commands/rival is claimed by rival-one 1.0"),
        (["acm"], 2, "Did you mean 'acme'?"),
        (["serve"], 2, "pip install oasr-server"),
        (["--nonsense"], 2, "No such option"),
        (["plugins", "list", "--axis", "tokenizer"], 2, "Did you mean 'tokenizers'?"),
        (["plugins", "show", "tokenizers/nix"], 2, "No tokenizer named 'nix'"),
        (["plugins", "show", "symbol_tabel"], 2, "Did you mean 'symbol_table'?"),
        (["plugins", "show", "acme"], 2, "ask for one of tokenizers/acme, commands/acme"),
        (["plugins", "show", "bad"], 2, "commands/bad cannot be loaded"),
    ],
)
def test_errors_are_messages_with_exit_codes(env, monkeypatch, capsys, arguments, code, message):
    """In this process, with the throw-away distributions on its path: a subprocess for each would be slow."""
    monkeypatch.delenv("OASR_DEBUG", raising=False)
    for site in env.sites:
        monkeypatch.syspath_prepend(str(env.root / site))
    assert main(arguments) == code
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr


def test_debug_shows_the_traceback_with_the_cause(env, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(env.root / "site"))
    monkeypatch.delenv("OASR_DEBUG", raising=False)
    assert main(["--debug", "bad"]) == 2
    stderr = capsys.readouterr().err
    assert "Traceback" in stderr
    assert "ModuleNotFoundError: No module named 'nothing_here'" in stderr
    monkeypatch.setenv("OASR_DEBUG", "1")
    main(["bad"])
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("OASR_DEBUG", "0")
    main(["bad"])
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(env, monkeypatch):
    monkeypatch.syspath_prepend(str(env.root / "site"))
    with pytest.raises(ZeroDivisionError):
        main(["acme", "crash"])


def test_version_and_no_arguments(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "oasr-core 0.1.0\n"
    main([])
    captured = capsys.readouterr()
    assert "Usage: oasr" in captured.out + captured.err


def test_warnings_about_plugins_are_plain_lines(env):
    done = env.cli("plugins", "list", env={"OASR_PLUGINS": "acme-tol"})
    assert done.returncode == 0
    assert done.stderr.startswith(
        "warning: OASR_PLUGINS names 'acme-tol', which matches no installed plugin. Did you mean"
    )
    strict = env.cli("plugins", "list", env={"OASR_PLUGINS": "acme-tol", "OASR_PLUGINS_STRICT": "1"})
    assert strict.returncode == 2
    assert strict.stderr.startswith("error: OASR_PLUGINS names 'acme-tol'")


def test_list_shows_owners_versions_and_what_stands_in_the_way(env):
    settings = {"OASR_PLUGINS_BLOCK": "acme-tool", "OASR_PLUGINS": "rival-one,rival-two,acme-int"}
    rows = env.cli("plugins", "list", "--json", env=settings).json()
    status = {(row["axis"], row["name"], row["distribution"]): row["status"] for row in rows}
    assert status["commands", "acme", "acme-tool"] == "blocked by 'acme-tool' in OASR_PLUGINS_BLOCK"
    assert status["commands", "bad", "acme-bad"] == "not in the allow list of OASR_PLUGINS"
    assert status["commands", "rival", "rival-one"] == status["commands", "rival", "rival-two"] == "conflict"
    assert status["commands", "int", "acme-int"] == "available"
    assert status["tokenizers", "symbol_table", "oasr-core"] == "available"

    preferring = {"OASR_PLUGINS_PREFER": "commands/rival=rival-two"}
    table = env.cli("plugins", "list", "--axis", "commands", env=preferring).stdout.splitlines()
    assert table[0].split() == ["AXIS", "NAME", "DISTRIBUTION", "VERSION", "STATUS"]
    assert all(line.startswith("commands") for line in table[1:])
    cells = [line.split(maxsplit=4) for line in table[1:]]
    assert ["commands", "rival", "rival-one", "1.0", "not preferred"] in cells
    assert ["commands", "rival", "rival-two", "1.0", "preferred"] in cells


def test_show_prints_facts_and_options(env, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(env.root / "site"))
    assert main(["plugins", "show", "tok", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["axis"], facts["distribution"], facts["version"], facts["api"]) == (
        "tokenizers",
        "acme-tok",
        "1.0",
        "1.0",
    )
    assert facts["source"].endswith("cli_acme_tok.py:13")
    assert facts["options"] == [
        {"name": "beam", "type": "int", "required": False, "default": 8, "description": "Width of the beam."},
        {"name": "path", "type": "str", "required": True, "default": None, "description": ""},
        {"name": "scale", "type": "float | None", "required": False, "default": None, "description": ""},
    ]
    assert main(["plugins", "show", "tokenizers/acme-tok:acme"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["distribution", "acme-tok"]
    assert lines[-3].split() == ["beam", "int", "8", "Width", "of", "the", "beam."]
    assert lines[-2].split() == ["path", "str", "(required)"]


def test_show_writes_types_shortly(capsys):
    assert main(["plugins", "show", "ctc"]) == 0
    types = {line.split()[0]: line.split("  ") for line in capsys.readouterr().out.splitlines()[10:] if line}
    assert "tuple[Hotword, ...]" in [cell.strip() for cell in types["hotwords"]]
    assert "Literal['beam', 'greedy']" in [cell.strip() for cell in types["search"]]


def test_check_imports_everything_and_fails_for_broken_ones_and_conflicts(tmp_path):
    """Blocking what needs torch keeps this quick; the whole set is checked by the packaging tests."""
    env = PluginEnv(tmp_path)
    env.add(
        "good-tok", entry_points={"oasr.tokenizers": {"g": "good_tok:Tok"}}, modules={"good_tok": tokenizer_source()}
    )
    heavy = (
        "models",
        "converters",
        "decode_strategies",
        "streaming_backends",
        "batching_policies",
        "partition_policies",
    )
    blocked = [
        f"{entry.axis}/{entry.name}"
        for axis in (*heavy, "frontends", "graph_backends", "pretrained", "commands")
        for entry in registry(axis).entries()
        if entry.path != "commands/plugins"
    ]
    settings = {"OASR_PLUGINS_BLOCK": ",".join(blocked)}
    good = env.cli("plugins", "check", env=settings)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "ok        tokenizers/g (good-tok 1.0)" in good.stdout
    assert "blocked   converters/native (oasr-core 0.1.0): blocked by" in good.stdout

    env.add(
        "bad-tok", entry_points={"oasr.tokenizers": {"b": "bad_tok:Tok"}}, modules={"bad_tok": "raise OSError('disk')"}
    )
    env.add("old-tok", requires=["oasr-core<0.1"])
    env.add("twin-tok", entry_points={"oasr.tokenizers": {"g": "good_tok:Tok"}})
    bad = env.cli("plugins", "check", "--json", env=settings)
    assert bad.returncode == 1
    report = bad.json()
    status = {(row["name"], row["distribution"]): row["status"] for row in report["plugins"]}
    assert status["b", "bad-tok"] == "broken"
    assert status["g", "good-tok"] == status["g", "twin-tok"] == "conflict"
    assert status["symbol_table", "oasr-core"] == "ok"
    assert [finding["subject"] for finding in report["findings"]] == ["old-tok"]


def test_the_installed_set_of_this_project_is_in_order(capsys):
    assert main(["plugins", "doctor"]) == 0, capsys.readouterr().out
