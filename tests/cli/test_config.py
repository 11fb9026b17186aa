from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oasr_core.cli.config import app
from oasr_core.cli.options import engine_flags, load_config_file, merge_flags, parse_assignments, resolve_sources
from oasr_core.config import EngineConfig
from oasr_core.errors import ConfigError


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def shown(*arguments: str) -> dict[str, dict[str, object]]:
    result = invoke("show", "--format", "json", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


# --- assignments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a=1.5", {"a": 1.5}),
        ("a=true", {"a": True}),
        ("a=null", {"a": None}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ('a={"b": 1}', {"a": {"b": 1}}),
        ("a=cuda:0", {"a": "cuda:0"}),
        ("a=", {"a": ""}),
        ("a=b=c", {"a": "b=c"}),
        (' a = "1" ', {"a": "1"}),
        ("a.b.c=no", {"a": {"b": {"c": "no"}}}),
    ],
)
def test_assignment_values(item: str, expected: dict[str, object]):
    assert parse_assignments([item], "--set") == expected


def test_assignments_join_and_the_last_wins():
    assert parse_assignments(["o.a=1", "o.b=2", "o.a=3"], "--set") == {"o": {"a": 3, "b": 2}}


@pytest.mark.parametrize("item", ["max_batch_size", "=1", "", "a..b=1", ".a=1"])
def test_malformed_assignments_are_refused(item: str):
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_assignments([item], "--set")


@pytest.mark.parametrize(
    ("option", "item", "example"),
    [
        ("--decode-option", "beam_size", "--decode-option beam_size=VALUE"),
        ("--decode-option", "=1", "--decode-option beam_size=8"),
        ("--set", "chunk_size", "--set chunk_size=VALUE"),
        ("--set", "", "--set max_batch_size=8"),
    ],
)
def test_the_example_is_about_the_key_that_was_given(option: str, item: str, example: str):
    with pytest.raises(ConfigError, match=f"for example {example}$"):
        parse_assignments([item], option)


def test_descending_into_a_value_is_refused():
    with pytest.raises(ConfigError, match="not a mapping"):
        parse_assignments(["a=1", "a.b=2"], "--set")


def test_named_options_and_set_must_agree():
    assert merge_flags({"device": "cpu"}, {"device": "cpu", "dtype": None}) == {"device": "cpu"}
    with pytest.raises(ConfigError, match="device is given twice"):
        merge_flags({"device": "cpu"}, {"device": "cuda"})
    flags = engine_flags(settings=["decode_options.a=1"], decode_options=["b=2"], model="m")
    assert flags == {"ckpt_dir": "m", "decode_options": {"a": 1, "b": 2}}
    with pytest.raises(ConfigError, match="a is given twice"):
        engine_flags(settings=["decode_options.a=1"], decode_options=["a=2"])


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "max_batch_size: 4\ndecode_options:\n  beam: 2\n"),
        ("c.yml", "{max_batch_size: 4, decode_options: {beam: 2}}"),
        ("c.toml", "max_batch_size = 4\n[decode_options]\nbeam = 2\n"),
        ("c.json", '{"max_batch_size": 4, "decode_options": {"beam": 2}}'),
    ],
)
def test_three_kinds_of_file(tmp_path: Path, name: str, text: str):
    assert load_config_file(written(tmp_path / name, text)) == {"max_batch_size": 4, "decode_options": {"beam": 2}}


def test_an_empty_file_sets_nothing(tmp_path: Path):
    assert load_config_file(written(tmp_path / "c.yaml", "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.ini", "a=1", "unknown kind of file '.ini'"),
        ("c.yaml", "- 1", "expected a mapping"),
        ("c.yaml", "1: 2", "expected a mapping"),
        ("c.json", "[1]", "expected a mapping"),
        ("c.yaml", "a: [", "c.yaml"),
        ("c.yaml", "a: [", "it is not valid YAML: "),
        ("c.json", "{", "it is not valid JSON: "),
        ("c.toml", "a =", "it is not valid TOML: "),
        ("c.yaml", "a: 1\na: 2\n", "'a' is given twice"),
        ("c.json", '{"a": 1, "a": 2}', "'a' is given twice"),
        ("c.yaml", "a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, name: str, text: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        load_config_file(written(tmp_path / name, text))
    assert str(tmp_path / name) in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config_file(tmp_path / "c.yaml")
    (tmp_path / "d.yaml").mkdir()
    with pytest.raises(ConfigError, match="directory"):
        load_config_file(tmp_path / "d.yaml")
    (tmp_path / "e.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config_file(tmp_path / "e.json")


def test_a_flag_mapping_extends_the_files(tmp_path: Path):
    file = written(tmp_path / "c.json", '{"decode_options": {"a": 1, "b": {"c": 2, "d": 3}}}')
    config, origins = resolve_sources(file, {"decode_options": {"b": {"c": 4}}})
    assert config.decode_options == {"a": 1, "b": {"c": 4, "d": 3}}
    assert origins["decode_options"] == "flag"


# --- oasr config ----------------------------------------------------------------------------------------------------


def test_show_lists_every_field_with_its_origin(tmp_path: Path):
    file = written(tmp_path / "c.yaml", "max_batch_size: 4\nchunk_size: 8\ndevice: cpu\n")
    document = shown("--config", str(file), "--set", "chunk_size=32")
    assert next(iter(document)) == "ckpt_dir"
    assert set(document) == set(EngineConfig.model_fields)
    assert document["max_batch_size"] == {"value": 4, "origin": "file"}
    assert document["chunk_size"] == {"value": 32, "origin": "flag"}
    assert document["num_left_chunks"] == {"value": -1, "origin": "default"}


def test_show_as_text():
    result = invoke("show", "--set", "decode_method=ctc")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["decode_method", "flag", '"ctc"'] in lines
    assert ["chunk_size", "default", "16"] in lines
    assert len(lines) == len(EngineConfig.model_fields)


def test_show_reads_the_checkpoint(wenet_digits: Path):
    document = shown("--model", str(wenet_digits), "--set", "num_left_chunks=4")
    assert document["ckpt_dir"] == {"value": str(wenet_digits), "origin": "flag"}
    assert document["audio_scale"] == {"value": 32768.0, "origin": "checkpoint"}
    assert document["decode_method"] == {"value": "ctc", "origin": "checkpoint"}
    assert document["num_left_chunks"] == {"value": 4, "origin": "flag"}
    assert document["max_batch_size"]["origin"] == "default"


def test_show_of_a_missing_checkpoint_is_refused():
    result = invoke("show", "--model", "no/such/model/anywhere")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no/such/model/anywhere" in result.stderr


def test_show_refuses_unknown_keys_with_the_nearest_name(tmp_path: Path):
    file = written(tmp_path / "c.toml", "max_batchsize = 4\n")
    result = invoke("show", "--config", str(file))
    assert result.exit_code == 2
    assert "max_batchsize" in result.stderr
    assert "Did you mean 'max_batch_size'?" in result.stderr
    assert str(file) in result.stderr
    result = invoke("show", "--set", "chunksize=4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Did you mean 'chunk_size'?" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--set", "max_batch_size=0"], "--set max_batch_size: "),
        (["--config", "c.yaml"], "--config c.yaml: "),
        (["--config", "c.yaml", "--set", "chunk_size=0"], "--config c.yaml, --set chunk_size: "),
        (["--config", "c.yaml", "--set", "max_batch_size=0"], "--set max_batch_size: "),
        (["--set", "chunksize=4"], "--set chunksize: "),
        (["--set", "decode_options=4"], "--set decode_options: "),
    ],
)
def test_a_wrong_value_names_its_origin(tmp_path: Path, monkeypatch, arguments: list[str], where: str):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "c.yaml", "max_batch_size: 0\n")
    result = invoke("show", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {where}invalid engine configuration")


def test_an_option_of_its_own_is_named():
    for named, option in (({"max_batch_size": 0}, "--batch-size"), ({"chunk_size": 0}, "--chunk-size")):
        with pytest.raises(ConfigError, match=f"^{option}: "):
            resolve_sources(None, engine_flags(**named))


def test_show_refuses_values_out_of_range():
    result = invoke("show", "--set", "max_batch_size=0")
    assert result.exit_code == 2
    assert "max_batch_size" in result.stderr


def test_schema_is_json_and_names_every_field():
    result = invoke("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert set(schema["properties"]) == set(EngineConfig.model_fields)
    assert schema["additionalProperties"] is False
    assert schema["properties"]["max_batch_size"]["minimum"] == 1
