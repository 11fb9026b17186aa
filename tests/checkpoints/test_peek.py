from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from oasr_core.checkpoints.inert_pickle import Opaque, read_structure
from oasr_core.checkpoints.peek import CheckpointPeek, TensorInfo
from oasr_core.errors import CheckpointError


def described(tensors):
    return {name: TensorInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()}


def damaged_zip(path: Path, name: str, content: bytes) -> None:
    """Write a zip like torch's whose pickle is ``content``."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data.pkl", content)
        archive.writestr(f"{name}/version", "3\n")


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_names_shapes_and_dtypes_equal_what_torch_loads(wenet_digits):
    for path in [wenet_digits / "final.pt", *wenet_digits.glob("variants/*/final.pt")]:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
        assert CheckpointPeek(path.parent).tensors("final.pt") == described(loaded)


def test_looking_imports_no_torch(wenet_digits):
    code = (
        "import sys; from oasr_core.checkpoints.peek import CheckpointPeek; "
        f"peek = CheckpointPeek({str(wenet_digits)!r}); assert len(peek.tensors('final.pt')) == 222; "
        "assert peek.yaml('train.yaml')['encoder'] == 'conformer'; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_kind_of_tensor_and_container_is_described(tmp_path, protocol):
    weights = OrderedDict(
        a=torch.zeros(2, 3),
        b=nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)),
        c=torch.zeros((), dtype=torch.int64),
        d=torch.zeros(0, 5, dtype=torch.bool),
        e=torch.zeros(3, dtype=torch.float16)[1:],
        f=torch.zeros(2, dtype=torch.uint16),
        g=torch.zeros(2, device="meta"),
        h=torch.zeros(6, 4).t(),
    )
    torch.save(weights, tmp_path / "w.pt", pickle_protocol=protocol)
    assert CheckpointPeek(tmp_path).tensors("w.pt") == described(weights)


@pytest.mark.parametrize("where", ["model", "state_dict", "model_state_dict"])
def test_the_weights_of_a_training_checkpoint_are_found(tmp_path, where):
    optimizer = {"state": {0: {"step": 3, "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 0.1, "params": {1}}]}
    content = {where: nn.Linear(2, 3).state_dict(), "optimizer": optimizer, "exp_dir": pathlib.PurePosixPath("/x")}
    torch.save({**content, "ema": {"weight": torch.zeros(1)}}, tmp_path / "w.pt")
    peek = CheckpointPeek(tmp_path)
    assert peek.tensors("w.pt") == {"weight": TensorInfo((3, 2), "float32"), "bias": TensorInfo((3,), "float32")}
    assert peek.tensors("w.pt", "ema") == {"weight": TensorInfo((1,), "float32")}
    with pytest.raises(CheckpointError, match=r"no tensors under 'nothing'; it holds: ema, exp_dir"):
        peek.tensors("w.pt", "nothing")


def test_safetensors_are_described(tmp_path):
    weights = {
        "a": torch.zeros(2, 3),
        "b": torch.zeros(4, dtype=torch.bfloat16),
        "c": torch.zeros((), dtype=torch.int64),
    }
    save_file(weights, tmp_path / "w.safetensors", metadata={"format": "pt"})
    assert CheckpointPeek(tmp_path).tensors("w.safetensors") == described(weights)


def test_nothing_in_a_pickle_is_executed(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path / 'executed'}",))

    torch.save({"weight": torch.zeros(2), "hostile": Hostile()}, tmp_path / "w.pt")
    assert CheckpointPeek(tmp_path).tensors("w.pt") == {"weight": TensorInfo((2,), "float32")}
    hostile = read_structure(pickle.dumps(Hostile(), protocol=2))
    assert isinstance(hostile, Opaque)
    assert hostile.origin == "posix.system"
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02}",
        b"\x80\x02.",
        b"\x80\x02K\x01r\xff\xff\xff\x7fh\x05.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x00K\x00K\x00tR.",
        b"\x80\x02}]K\x01s.",
        b"(" * 10000 + b".",
        b"\x80\x02Q.",
        b"S'bad \\o escape'\n.",
    ],
)
def test_malformed_pickles_are_refused(tmp_path, content):
    damaged_zip(tmp_path / "w.pt", "w", content)
    with pytest.raises(CheckpointError, match=r"w\.pt (is not a readable torch checkpoint|holds a)"):
        CheckpointPeek(tmp_path).tensors("w.pt")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_pickle_raises_only_value_error(data):
    buffer = io.BytesIO()
    torch.save({"model": nn.Linear(2, 3).state_dict(), "epoch": 3}, buffer)
    with zipfile.ZipFile(buffer) as archive:
        name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        content = bytearray(archive.read(name))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        read_structure(bytes(content))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("name", ["final.pt", "w.safetensors"])
def test_truncated_files_are_refused_by_name(tmp_path, wenet_digits, name, share):
    if name == "w.safetensors":
        save_file({"a": torch.zeros(1000)}, tmp_path / name)
        content = (tmp_path / name).read_bytes()
    else:
        content = (wenet_digits / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=rf"{name}.*(truncated|not a whole|malformed).*Fetch it again"):
        CheckpointPeek(tmp_path).tensors(name)


def test_legacy_torch_files_are_refused_by_name(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pickle.pt", _use_new_zipfile_serialization=False)
    with tarfile.open(tmp_path / "tar.pt", "w") as archive:
        for member in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(member))
    for name in ("pickle.pt", "tar.pt"):
        with pytest.raises(CheckpointError, match=r"legacy torch format.*Save it again"):
            CheckpointPeek(tmp_path).tensors(name)


def test_torchscript_is_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "final.zip", "w") as archive:
        archive.writestr("final/code/__torch__.py", "")
        archive.writestr("final/data.pkl", b"\x80\x02}.")
    with pytest.raises(CheckpointError, match=r"final\.zip is a TorchScript program"):
        CheckpointPeek(tmp_path).tensors("final.zip")


def test_a_download_page_in_place_of_weights_is_refused(tmp_path):
    (tmp_path / "w.pt").write_text("<!doctype html><title>404</title>")
    with pytest.raises(CheckpointError, match="neither a torch zip checkpoint nor a safetensors file"):
        CheckpointPeek(tmp_path).tensors("w.pt")


def test_git_lfs_pointers_are_refused_with_the_fix(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7897339\n"
    (tmp_path / "final.pt").write_text(pointer)
    peek = CheckpointPeek(tmp_path)
    for read in (peek.tensors, peek.text, peek.yaml, peek.resolve_inside):
        with pytest.raises(CheckpointError, match=r"final\.pt is a Git LFS pointer.*git lfs pull"):
            read("final.pt")


def safetensors(path: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": 3},
        b'{"a":' + b"[" * 100_000,
        b"{not json",
    ],
)
def test_malformed_safetensors_headers_are_refused(tmp_path, header):
    safetensors(tmp_path / "w.safetensors", header, b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"w\.safetensors"):
        CheckpointPeek(tmp_path).tensors("w.safetensors")


def test_headers_are_bounded(tmp_path):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write((100 * 2**20).to_bytes(8, "little") + b"{")
        file.truncate(200 * 2**20)
    with pytest.raises(CheckpointError, match="announces a header of 104857600 bytes"):
        CheckpointPeek(tmp_path).tensors(path.name)
    with zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", b"\0" * (65 * 2**20))
    with pytest.raises(CheckpointError, match=r"data\.pkl is larger than"):
        CheckpointPeek(tmp_path).tensors("bomb.pt")


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path):
    root = tmp_path / "model"
    (root / "data" / "lang").mkdir(parents=True)
    (root / ".git").mkdir()
    for name in ("train.yaml", "units.txt", "data/lang/units.txt", "data/lang/tokens.txt", ".git/config"):
        (root / name).write_text(name, encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    return root


def test_files_are_listed_without_hidden_ones(directory):
    assert CheckpointPeek(directory).files() == (
        "train.yaml",
        "units.txt",
        "data/lang/tokens.txt",
        "data/lang/units.txt",
    )
    assert CheckpointPeek(directory / "units.txt").files() == ("units.txt",)


def test_files_of_a_huge_tree_are_bounded(tmp_path):
    (tmp_path / "a/b/c/d/e").mkdir(parents=True)
    for folder in ("a/b/c", "a/b/c/d"):
        (tmp_path / folder / "x").touch()
    assert CheckpointPeek(tmp_path).files() == ("a/b/c/x",)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("/mnt/train/exp/dict/units.txt", "units.txt"),
        ("data/lang/units.txt", "units.txt"),
        ("data/lang/tokens.txt", "data/lang/tokens.txt"),
        ("../../dict/units.txt", "units.txt"),
        ("C:\\train\\units.txt", "units.txt"),
    ],
)
def test_names_in_a_configuration_are_found_by_base_name_first(directory, name, found):
    assert CheckpointPeek(directory).resolve_inside(name) == directory / found


def test_a_name_that_is_listed_is_read_as_it_stands(directory):
    assert CheckpointPeek(directory).text("data/lang/units.txt") == "data/lang/units.txt"


@pytest.mark.parametrize(
    "name", ["../secret.txt", "/etc/passwd", "data/../../secret.txt", "..", ".", "", "/", "a\0b", "data/.."]
)
def test_names_that_leave_the_directory_are_refused(directory, name):
    peek = CheckpointPeek(directory)
    assert not peek.exists(name)
    with pytest.raises(CheckpointError, match=r"outside of the checkpoint|names no file|is not in"):
        peek.resolve_inside(name)
    with pytest.raises(CheckpointError):
        peek.text(name)


def test_a_missing_file_is_named_with_the_nearest_one(directory):
    with pytest.raises(
        CheckpointError, match=r"'unit\.txt' is not in .*model \(it has: .*units\.txt.*\)\. Did you mean 'units\.txt'"
    ):
        CheckpointPeek(directory).resolve_inside("unit.txt")


def test_links_out_of_the_directory_are_refused_and_links_inside_followed(directory):
    (directory / "out.txt").symlink_to("../secret.txt")
    (directory / "in.txt").symlink_to("data/lang/tokens.txt")
    (directory / "dangling.txt").symlink_to("nowhere")
    peek = CheckpointPeek(directory)
    assert peek.text("in.txt") == "data/lang/tokens.txt"
    with pytest.raises(CheckpointError, match=r"symbolic link to .*secret\.txt, outside of the checkpoint"):
        peek.text("out.txt")
    with pytest.raises(CheckpointError, match=r"'dangling\.txt' is not in"):
        peek.text("dangling.txt")


def test_links_of_a_hub_snapshot_into_its_blobs_are_followed(tmp_path):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / "abc"
    (snapshot / "lang").mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "123").write_text("content")
    (repo / "refs").write_text("not a blob")
    (snapshot / "units.txt").symlink_to("../../blobs/123")
    (snapshot / "lang" / "tokens.txt").symlink_to("../../../blobs/123")
    (snapshot / "refs.txt").symlink_to("../../refs")
    peek = CheckpointPeek(snapshot)
    assert peek.text("units.txt") == peek.text("lang/tokens.txt") == "content"
    assert CheckpointPeek(snapshot / "lang").text("tokens.txt") == "content"
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        peek.text("refs.txt")


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        CheckpointPeek(tmp_path / "nothing")


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1, 2", "not valid YAML"),
        (b"a: 1\nb: c: 2\n", r"not valid YAML: line 2: [^\n]+ \(column 5\)\.$"),
        (b"a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        (b"a: \xff", "not UTF-8 text: byte 3 is 0xff"),
        (b"[" * 5000, "not valid YAML"),
        (b"#" * (4 * 2**20 + 1), "larger than"),
    ],
)
def test_bad_yaml_is_refused(tmp_path, content, reason):
    (tmp_path / "train.yaml").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"train\.yaml.*{reason}"):
        CheckpointPeek(tmp_path).yaml("train.yaml")


@pytest.mark.parametrize("content", [b"{", b"[" * 100_000, b"\xff\xfe{}"])
def test_bad_json_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        CheckpointPeek(tmp_path).json("config.json")


def test_texts_are_read(tmp_path):
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": "ä"}).encode())
    (tmp_path / "a.yaml").write_text("a: [1, 2]")
    peek = CheckpointPeek(tmp_path)
    assert peek.json("a.json") == {"a": "ä"}
    assert peek.yaml("a.yaml") == {"a": [1, 2]}
