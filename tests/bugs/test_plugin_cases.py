"""Bugs that plugin systems in the wild had, replayed against the registries."""

from __future__ import annotations

import json
import tomllib

import importlib_metadata
import pytest

from oasr_core.errors import PluginContractError, UnknownPluginError
from oasr_core.registry import AXES, registry
from oasr_core.testing.plugin_env import PluginEnv, plugin_env, tokenizer_source

__all__ = ["plugin_env"]

RESOLVE = """
import json, warnings
from oasr_core.errors import OasrError
from oasr_core.registry import registry
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    try:
        found = registry("tokenizers").get(NAME)
        result = found.__module__
    except OasrError as error:
        result = f"{type(error).__name__}: {error}"
print(json.dumps([result, [str(w.message) for w in seen]]))
"""


def resolve(env: PluginEnv, name: str, **variables: str) -> tuple[str, list[str]]:
    """The module that ``name`` resolves to in a fresh process, or its error, and the warnings."""
    result, warned = env.python(f"NAME = {name!r}\n{RESOLVE}", env=variables).json()
    return result, warned


def test_simonw_llm_1280_one_installed_plugin_that_cannot_be_imported_breaks_no_command(plugin_env):
    sources = {
        "import": "import nothing_of_the_kind",
        "syntax": "def (",
        "exit": "raise SystemExit(1)",
        "half": "from oasr_core.registry import register_tokenizer\nregister_tokenizer('left_over', int)\n1 / 0",
    }
    for kind, source in sources.items():
        plugin_env.add(
            f"bad-{kind}",
            entry_points={
                "oasr.commands": {f"bad-{kind}": f"bad_{kind}:app"},
                "oasr.tokenizers": {f"bad_{kind}": f"bad_{kind}:Tok"},
                "oasr": {f"bad_{kind}": f"bad_{kind}"},
            },
            modules={f"bad_{kind}": source},
        )
    for arguments in (["--help"], ["plugins", "list"], ["plugins", "show", "symbol_table"], ["config", "--help"]):
        done = plugin_env.cli(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
    listed = plugin_env.cli("plugins", "list", "--axis", "tokenizers").stdout
    assert all(f"bad_{kind}" in listed for kind in sources)
    done = plugin_env.python(
        "from oasr_core.registry import registry\n"
        "for axis in ('tokenizers', 'commands'):\n"
        "    for name in registry(axis).names():\n"
        "        if name.startswith('bad'):\n"
        "            try: registry(axis).get(name)\n"
        "            except ImportError: pass\n"
        "print(registry('tokenizers').names())\n"
    )
    assert "left_over" not in done.stdout
    assert "symbol_table" in done.stdout


def test_vllm_43987_a_typo_in_the_allow_list_is_said_and_stale_metadata_is_found(plugin_env):
    plugin_env.add(
        "acme-tok",
        "2.0",
        entry_points={"oasr.tokenizers": {"acme": "acme_tok:Tok"}},
        modules={"acme_tok": tokenizer_source()},
    )
    result, warned = resolve(plugin_env, "acme", OASR_PLUGINS="acme_tokk")
    assert result.startswith("UnknownPluginError")
    assert "not in the allow list of OASR_PLUGINS" in result
    assert warned == ["OASR_PLUGINS names 'acme_tokk', which matches no installed plugin. Did you mean 'acme-tok'?"]
    result, _ = resolve(plugin_env, "acme", OASR_PLUGINS="acme_tokk", OASR_PLUGINS_STRICT="1")
    assert result.startswith("PluginSelectionError")
    assert resolve(plugin_env, "acme", OASR_PLUGINS="Acme_Tok") == ("acme_tok", [])

    plugin_env.add("acme-tok", "1.0", site="stale")  # behind the real one: harmless, reported
    assert resolve(plugin_env, "acme") == ("acme_tok", [])
    assert "duplicate-distribution  acme-tok" in plugin_env.cli("plugins", "doctor").stdout
    plugin_env.sites.reverse()  # in front of it: hides the entry points, reported
    result, _ = resolve(plugin_env, "acme")
    assert result.startswith("UnknownPluginError: No tokenizer named 'acme'")
    done = plugin_env.cli("plugins", "doctor")
    assert done.returncode == 1
    assert "version 1.0, 0 oasr entry points" in done.stdout


def test_vllm_48277_what_was_asked_for_and_fails_is_an_error_not_another_backend(plugin_env):
    plugin_env.add(
        "acme-tok",
        entry_points={"oasr.tokenizers": {"acme": "acme_tok:Tok"}},
        modules={"acme_tok": "raise OSError('no GPU')"},
    )
    result, _ = resolve(plugin_env, "acme")
    assert result.startswith("PluginLoadError: tokenizers/acme cannot be loaded")
    assert "OSError: no GPU" in result
    with pytest.raises(UnknownPluginError, match=r"No graph backend named 'no_such_backend'. Installed: eager"):
        registry("graph_backends").get("no_such_backend")


@pytest.mark.parametrize("front", ["one", "two"])
def test_vllm_gguf_plugin_26_two_owners_of_a_name_are_refused_in_either_order_on_the_path(plugin_env, front):
    for owner in ("one", "two"):
        plugin_env.add(
            f"rival-{owner}",
            entry_points={"oasr.tokenizers": {"rival": f"rival_{owner}:Tok", "symbol_table": f"rival_{owner}:Tok"}},
            modules={f"rival_{owner}": tokenizer_source()},
            site=owner,
            first=owner == front,
        )
    result, _ = resolve(plugin_env, "rival")
    assert result.startswith(
        "PluginConflictError: tokenizers/rival is claimed by rival-one 1.0 (rival_one:Tok) and rival-two"
    )
    for owner in ("one", "two"):
        assert (
            resolve(plugin_env, "rival", OASR_PLUGINS_PREFER=f"tokenizers/rival=rival-{owner}")[0] == f"rival_{owner}"
        )
    result, _ = resolve(plugin_env, "symbol_table")
    assert "claimed by oasr-core 0" in result
    assert "rival-one 1.0" in result


def test_datasette_802_every_subcommand_of_the_listing_runs(plugin_env, monkeypatch, capsys):
    from oasr_core.cli.main import main
    from oasr_core.cli.plugins import app

    plugin_env.add(
        "acme-tok",
        entry_points={"oasr.tokenizers": {"acme": "datasette_tok:Tok"}},
        modules={"datasette_tok": tokenizer_source()},
    )
    keep = {"tokenizers/acme", "commands/plugins"}
    entries = [entry for axis in AXES for entry in registry(axis).entries()]
    monkeypatch.setenv("OASR_PLUGINS_BLOCK", ",".join(sorted({entry.path for entry in entries} - keep)))
    monkeypatch.syspath_prepend(str(plugin_env.root / "site"))
    arguments = {"list": [], "show": ["tokenizers/acme"], "check": [], "doctor": []}
    assert {command.name for command in app.registered_commands} == set(arguments)
    for name, rest in arguments.items():
        for form in ([], ["--json"]):
            code, shown = main(["plugins", name, *rest, *form]), capsys.readouterr().out
            assert code == 0, (name, form, shown)
            if form:
                assert ("acme" in str(json.loads(shown))) is (name != "doctor")


def test_sqlite_dist_9_installed_metadata_has_the_entry_points_of_the_sources(repo_root):
    for path in [repo_root / "pyproject.toml", *sorted(repo_root.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text())["project"]
        declared = {
            (group, name, value)
            for group, points in project.get("entry-points", {}).items()
            for name, value in points.items()
        }
        installed = importlib_metadata.distribution(project["name"]).entry_points
        found = {(point.group, point.name, point.value) for point in installed if point.group.startswith("oasr")}
        assert found == declared, f"{project['name']}: reinstall it, its metadata is not that of {path}"


def test_speechbrain_2986_an_encoder_whose_parameters_are_renamed_is_refused():
    from oasr_core.models.base import BaseAsrModel, BaseEncoder

    class Encoder(BaseEncoder):
        def output_frames(self, feature_frames):
            return feature_frames

        def encode(self, wavs, wav_lens=None):
            """Lengths that nobody passes: every mask would be silently left out."""

    class Model(BaseAsrModel):
        oasr_api = "1.0"
        architecture = "renamed"
        interfaces = {}  # noqa: RUF012
        vocab_size = 2

        @classmethod
        def from_config(cls, config):
            return cls()

    models = registry("models")
    with models.override("renamed", Model):
        encoder = Encoder()
        with pytest.raises(PluginContractError) as caught:
            models.check_part("renamed", "encoder", encoder)
        message = str(caught.value)
        assert "Encoder.encode(self, wavs, wav_lens=None) cannot take the parameter 'batch' in position 1" in message
        assert f"{__file__}:" in message
        with pytest.raises(PluginContractError, match="its encoder is a Model, which is no subclass of"):
            models.check_part("renamed", "encoder", Model())
