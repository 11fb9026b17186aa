"""``oasr convert`` and ``oasr models``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.pretrained import PretrainedModel
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.cli.convert import app as convert_app
from oasr_core.cli.main import main
from oasr_core.cli.models import app as models_app
from oasr_core.errors import CheckpointError
from oasr_core.registry import registry


def run(app, *arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def variant(wenet_digits):
    return wenet_digits / "variants" / "v1_batchnorm_noncausal_old_yaml"


def test_a_wenet_directory_is_converted_and_says_what_it_took(variant, tmp_path):
    result = run(convert_app, variant, tmp_path / "native")
    assert result.exit_code == 0
    assert f"{variant}: conformer, by converter wenet" in result.stdout
    assert "121 tensors loaded, 10 known and not needed, 0 dropped" in result.stdout
    assert "MB written" in result.stdout
    original, native = (load_model(resolve_checkpoint(path))[0] for path in (variant, tmp_path / "native"))
    weights = native.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in original.state_dict().items())


def test_conversion_of_a_native_bundle_gives_the_same_bytes(variant, tmp_path):
    run(convert_app, variant, tmp_path / "a")
    run(convert_app, tmp_path / "a", tmp_path / "b")
    for name in ("oasr_config.json", "model.safetensors", "tokenizer/units.txt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_weights_are_stored_in_the_wanted_type(variant, tmp_path):
    run(convert_app, variant, tmp_path / "native", "--dtype", "bf16", "--architecture", "conformer")
    weights = resolve_checkpoint(tmp_path / "native").state_dict
    assert {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()} == {torch.bfloat16}
    assert run(convert_app, variant, tmp_path / "x", "--dtype", "int4").exit_code == 2


def test_another_weights_file_is_read(variant, tmp_path):
    copy = tmp_path / "model"
    copy.mkdir()
    for path in variant.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "final.pt").rename(copy / "avg_5.pt")
    run(convert_app, copy, tmp_path / "native", "--checkpoint-name", "avg_5.pt")
    assert (tmp_path / "native" / "oasr_config.json").exists()
    with pytest.raises(CheckpointError, match=r"final\.pt"):
        run(convert_app, copy, tmp_path / "other")


def test_what_is_there_is_kept_unless_forced(variant, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        run(convert_app, variant, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    assert run(convert_app, variant, tmp_path, "--force").exit_code == 0
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_foreign_directory_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "src").mkdir()
    with pytest.raises(CheckpointError, match="No converter recognises"):
        run(convert_app, tmp_path / "src", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/checkpoint/anywhere", "dst"], "no/such/checkpoint/anywhere"),
        (["foreign", "dst"], "No converter recognises"),
        (["variant", "dst", "--architecture", "nix"], "No installed converter produces architecture 'nix'"),
        (["variant", "dst", "--checkpoint-name", "nix.pt"], "'nix.pt' is not in"),
        (["variant", "full"], "is not empty"),
        (["variant", "file"], "is a file"),
    ],
)
def test_what_cannot_be_converted_exits_with_2(variant, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "variant").symlink_to(variant)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").touch()
    (tmp_path / "file").touch()
    assert main(["convert", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err


class _Named(PretrainedModel):
    oasr_api = "1.0"
    description = "For tests."
    licence = "Apache-2.0"
    languages = ("en", "de")
    sample_rate = 8000
    name = "test-model"

    def path(self):
        raise AssertionError("listing asks no model for its path")


def test_models_lists_names_architectures_and_formats():
    with registry("pretrained").override("test-model", _Named()):
        text = run(models_app).stdout
        facts = json.loads(run(models_app, "--json").stdout)
    assert "  test-model  (in-process)\n      For tests. en, de, 8000 Hz, Apache-2.0" in text
    assert "oasr_config.json" in text
    model = next(row for row in facts["pretrained"] if row["name"] == "test-model")
    assert model["languages"] == ["en", "de"]
    assert model["sample_rate"] == 8000
    assert any(row["name"] == "conformer" for row in facts["architectures"])
    wenet = next(row for row in facts["converters"] if row["name"] == "wenet")
    assert wenet["distribution"] == "oasr-conformer"
    assert any("train.yaml" in marker for marker in wenet["looks_for"])


def test_a_broken_plugin_is_shown_and_hides_nothing():
    with (
        registry("converters").override("broken", int),
        registry("pretrained").override("broken", 3),
    ):
        text = run(models_app).stdout
    assert text.count("broken: ") == 2
    assert "wenet" in text


def test_the_lists_and_the_help_import_no_torch():
    code = (
        "import sys; from oasr_core.cli import convert, models; from typer.testing import CliRunner; "
        "assert CliRunner().invoke(models.app, ['--json']).exit_code == 0; "
        "assert CliRunner().invoke(convert.app, ['--help']).exit_code == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
