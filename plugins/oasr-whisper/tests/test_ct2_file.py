"""``model.bin`` is read in every version, and a damaged file is refused with the place and the reason."""

from __future__ import annotations

import struct

import pytest
import torch

from oasr_core.errors import CheckpointError
from oasr_whisper.ct2_file import open_ct2, read_spec

VARIABLES = {
    "a/weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a/weight_scale": torch.tensor([2.0, 4.0]),
    "b": torch.tensor(-3, dtype=torch.int16),
    "c": torch.arange(3, dtype=torch.int8),
}


@pytest.fixture
def file(tmp_path, write_model_bin):
    """``file(**how)``: a written file's path."""

    def make(variables=VARIABLES, **how):
        write_model_bin(tmp_path / "model.bin", variables, **how)
        return tmp_path / "model.bin"

    return make


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5, 6])
def test_every_version_is_read(file, version):
    found = open_ct2(file(version=version, spec="WhisperSpec"))
    assert (found.version, found.spec, found.revision) == (version, *(("WhisperSpec", 3) if version > 1 else ("", 1)))
    for name, tensor in VARIABLES.items():
        variable = found.variables[name]
        assert variable.shape == tuple(tensor.shape)
        assert variable.dtype == str(tensor.dtype).removeprefix("torch.")
        assert found.content(variable) == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert found.scalar("b") == -3
    assert found.scalar("absent") is None
    assert found.scalar("a/weight") is None


def test_an_alias_stands_for_the_scale_too(file):
    found = open_ct2(file(aliases={"p/weight": "a/weight", "q": "b"}))
    assert found.variables["p/weight"] == found.variables["a/weight"]
    assert found.variables["p/weight_scale"] == found.variables["a/weight_scale"]
    assert found.variables["q"] == found.variables["b"]
    assert "q_scale" not in found.variables


def test_the_spec_is_told_by_the_first_bytes(file, tmp_path):
    assert read_spec(file()) == "WhisperSpec"
    assert read_spec(file(spec="TransformerSpec", version=9)) == "TransformerSpec"
    for content in (
        b"",
        b"\x06",
        b"PK\x03\x04" * 9,
        b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
        struct.pack("<IH", 6, 5),
    ):
        (tmp_path / "other").write_bytes(content)
        assert read_spec(tmp_path / "other") is None
    assert read_spec(tmp_path / "nothing") is None


def test_every_truncation_is_refused_with_its_offset(file):
    path = file(aliases={"d": "b"})
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.bin is damaged.*at byte \d+: .*truncated"):
            open_ct2(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_ct2(path)


def corrupt(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (struct.pack("<BII", 2, 2, 3), struct.pack("<BII", 2, 2, 4), r"'a/weight' of shape \(2, 4\) .* 24 bytes"),
        (struct.pack("<BII", 2, 2, 3), struct.pack("<BII", 9, 2, 3), "'a/weight' has rank 9"),
        (struct.pack("<IBI", 3, 0, 24), struct.pack("<IBI", 3, 7, 24), "'a/weight' has the type 7; known are 0 to 5"),
        (b"c\0\x01", b"c!\x01", "the name of a variable is not text: it does not end with a zero byte"),
        (b"a/weight\0", b"a/w\xffight\0", "the name of a variable is not text"),
        (b"\x02\0c\0", b"\0\0c\0", "the name of a variable has 0 bytes"),
    ],
)
def test_corruption_is_refused_with_its_reason(file, old, new, message):
    with pytest.raises(CheckpointError, match=rf"at byte \d+: {message}"):
        open_ct2(corrupt(file(), old, new))


def test_item_sizes_of_old_versions_are_checked(file):
    path = corrupt(file({"c": VARIABLES["c"]}, version=3), struct.pack("<IBI", 3, 1, 3), struct.pack("<IBI", 3, 8, 3))
    with pytest.raises(CheckpointError, match="'c' has items of 8 bytes; known are 4, 2, 1"):
        open_ct2(path)


def test_an_alias_of_nothing_is_refused(file):
    with pytest.raises(CheckpointError, match="'d' stands for 'x', which the file does not have"):
        open_ct2(file(aliases={"d": "x"}))


def test_what_follows_the_end_is_refused(file):
    path = file()
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match="4 bytes follow"):
        open_ct2(path)


@pytest.mark.parametrize("version", [0, 7, 0x6C6D7448])
def test_other_versions_are_refused(file, version):
    path = file()
    path.write_bytes(struct.pack("<I", version) + path.read_bytes()[4:])
    with pytest.raises(CheckpointError, match=f"binary version {version}, known are 1 to 6"):
        open_ct2(path)
