from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oasr_core.checkpoints.bundle import TokenizerSpec
from oasr_core.checkpoints.load import load_model
from oasr_core.checkpoints.native import NativeConverter, save_native
from oasr_core.checkpoints.peek import CheckpointPeek
from oasr_core.checkpoints.resolve import resolve_checkpoint
from oasr_core.errors import CheckpointError


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


def read(directory: Path):
    return NativeConverter().convert(CheckpointPeek(directory))


@pytest.fixture
def native(tiny_bundle, tmp_path):
    return save_native(tiny_bundle, tmp_path / "native")


def test_a_bundle_comes_back_as_it_was(tiny_bundle, native):
    back = resolve_checkpoint(native)
    for field in ("architecture", "config", "feature", "decoding"):
        assert getattr(back, field) == getattr(tiny_bundle, field)
    assert back.tokenizer.kind == "symbol_table"
    assert back.tokenizer.options == {"special_ids": [0]}
    assert back.tokenizer.files == {"symbols": native / "tokenizer" / "units.txt"}
    assert back.tokenizer.files["symbols"].read_bytes() == tiny_bundle.tokenizer.files["symbols"].read_bytes()
    assert back.metadata == {"source": "origin", "converter": "test"}
    assert back.converter == "native"
    assert sorted(back.state_dict) == sorted(tiny_bundle.state_dict)
    assert all(torch.equal(back.state_dict[name], tensor) for name, tensor in tiny_bundle.state_dict.items())
    load_model(back)


def test_equal_bundles_give_equal_bytes_and_no_machine_paths(tiny_bundle, native, tmp_path):
    shuffled = dict(reversed(list(tiny_bundle.state_dict.items())))
    again = save_native(replace(tiny_bundle, state_dict=shuffled), tmp_path / "again")
    assert contents(again) == contents(native)
    assert contents(save_native(read(native), tmp_path / "third")) == contents(native)
    assert str(tmp_path).encode() not in b"".join(contents(native).values())


@pytest.mark.slow
def test_writing_is_deterministic_across_processes(native, tmp_path):
    code = (
        "import sys; from oasr_core.checkpoints import native, peek; "
        "native.save_native(native.NativeConverter().convert(peek.CheckpointPeek(sys.argv[1])), sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, native, tmp_path / "other"], check=True)
    assert contents(tmp_path / "other") == contents(native)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_weights_are_cast_and_integers_are_not(tiny_bundle, tmp_path, name, dtype):
    weights = {**tiny_bundle.state_dict, "count": torch.tensor(3)}
    save_native(replace(tiny_bundle, state_dict=weights), tmp_path / "native", dtype=name)
    back = read(tmp_path / "native").state_dict
    assert back["head.weight"].dtype == dtype
    assert torch.equal(back["head.weight"], weights["head.weight"].to(dtype))
    assert back["count"].dtype == torch.int64


def test_an_unknown_dtype_is_refused(tiny_bundle, tmp_path):
    with pytest.raises(CheckpointError, match="'int8' is unknown; expected one of fp32, bf16, fp16"):
        save_native(tiny_bundle, tmp_path / "native", dtype="int8")


def test_tensors_that_share_memory_are_stored(tiny_bundle, tmp_path):
    base = torch.randn(8)
    weights = {"a": base, "b": base, "c": base[2:4], "d": torch.randn(2, 3).t()}
    save_native(replace(tiny_bundle, state_dict=weights), tmp_path / "native")
    back = read(tmp_path / "native").state_dict
    assert all(torch.equal(back[name], tensor) for name, tensor in weights.items())
    assert (tmp_path / "native" / "model.safetensors").stat().st_size < 1000


def test_tokenizer_files_of_one_name_are_kept_apart(tiny_bundle, tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    spec = TokenizerSpec("symbol_table", {"symbols": tmp_path / "a/x.txt", "sentencepiece": tmp_path / "b/x.txt"})
    native = save_native(replace(tiny_bundle, tokenizer=spec), tmp_path / "native")
    files = read(native).tokenizer.files
    assert {role: path.read_text() for role, path in files.items()} == {"symbols": "a", "sentencepiece": "b"}


def test_values_that_json_cannot_hold_are_refused(tiny_bundle, tmp_path):
    with pytest.raises(CheckpointError, match="values that JSON cannot hold"):
        save_native(replace(tiny_bundle, config={"width": {1, 2}}), tmp_path / "native")
    assert not (tmp_path / "native" / "oasr_config.json").exists()


def test_what_is_there_is_not_overwritten(tiny_bundle, tmp_path):
    target = tmp_path / "native"
    target.mkdir()
    save_native(tiny_bundle, target)
    (target / "notes.txt").write_text("mine")
    before = contents(target)
    with pytest.raises(CheckpointError, match=r"native is not empty.*--force"):
        save_native(tiny_bundle, target)
    assert contents(target) == before
    save_native(tiny_bundle, target, force=True)
    assert contents(target) == before
    with pytest.raises(CheckpointError, match=r"notes\.txt is a file; expected a directory"):
        save_native(tiny_bundle, target / "notes.txt", force=True)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_every_file_has_the_mode_that_the_umask_asks_for(tiny_bundle, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        directory = save_native(tiny_bundle, tmp_path / "native")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in directory.rglob("*") if path.is_file()}
    assert modes == {mode}


def test_a_bundle_may_be_written_over_itself(native):
    before = contents(native)
    save_native(read(native), native, force=True)
    assert contents(native) == before


# --- damaged bundles -------------------------------------------------------------------------------------------------


def edit(directory: Path, change) -> None:
    path = directory / "oasr_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer/units.txt"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing"])
def test_damaged_files_are_refused_by_name(native, name, how):
    content = bytearray((native / name).read_bytes())
    if how == "missing":
        (native / name).unlink()
    elif how == "truncated":
        (native / name).write_bytes(content[:-1])
    else:
        content[-1] ^= 1
        (native / name).write_bytes(content)
    reason = {"truncated": "bytes instead of", "flipped": "recorded sha256", "missing": "is not in"}[how]
    with pytest.raises(CheckpointError, match=rf"{Path(name).name}.* {reason}"):
        resolve_checkpoint(native)


def test_a_newer_format_is_refused(native):
    edit(native, lambda config: config.update(format_version=2, future={}))
    with pytest.raises(CheckpointError, match=r"format version 2; this oasr-core reads up to 1: upgrade oasr-core"):
        resolve_checkpoint(native)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda config: config.pop("architecture"), "architecture: Field required"),
        (lambda config: config.update(stranger=1), "stranger: Extra inputs"),
        (lambda config: config.update(format="other"), "format: Input should be 'oasr'"),
        (lambda config: config.update(format_version=0), "format_version"),
        (lambda config: config["feature"].update(audio_scale="loud"), r"feature\.audio_scale"),
        (lambda config: config["files"].pop("tokenizer/units.txt"), r"'tokenizer/units\.txt' is not among its files"),
        (lambda config: config["files"].update({"../../x": {"sha256": "", "size": 0}}), "outside of the checkpoint"),
    ],
)
def test_a_wrong_configuration_is_refused(native, change, reason):
    edit(native, change)
    with pytest.raises(CheckpointError, match=reason):
        resolve_checkpoint(native)


@pytest.mark.parametrize("content", ["", "[]", "3", "{", "null"])
def test_a_configuration_that_is_no_object_is_refused(native, content):
    (native / "oasr_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"oasr_config\.json"):
        resolve_checkpoint(native)


def test_loading_is_strict(tiny_bundle, tmp_path):
    extra = {**tiny_bundle.state_dict, "encoder.pe": torch.zeros(2)}
    native = save_native(replace(tiny_bundle, state_dict=extra), tmp_path / "native")
    with pytest.raises(CheckpointError, match=r"exactly the model's tensors, this one has others: encoder\.pe"):
        load_model(resolve_checkpoint(native))
