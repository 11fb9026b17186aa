from __future__ import annotations

import argparse
import os
import pathlib
import threading

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from oasr_core.checkpoints.unpickle import load_safetensors, load_torch_weights
from oasr_core.errors import CheckpointError


def test_weights_of_the_digits_checkpoint(wenet_digits):
    weights = load_torch_weights(wenet_digits / "final.pt")
    expected = torch.load(wenet_digits / "final.pt", weights_only=True)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("key", [None, "model"])
def test_paths_and_namespaces_in_training_checkpoints_are_harmless(tmp_path, key):
    weights = nn.Linear(2, 3).state_dict()
    content = {"model": weights, "lang": pathlib.Path("/a/b"), "win": pathlib.PureWindowsPath("C:/a")}
    torch.save({**content, "args": argparse.Namespace(epoch=3)}, tmp_path / "w.pt")
    loaded = load_torch_weights(tmp_path / "w.pt", key)
    assert sorted(loaded) == ["bias", "weight"]
    assert torch.equal(loaded["weight"], weights["weight"])


def test_loads_at_the_same_time_do_not_disturb_each_other(tmp_path):
    torch.save({"a": torch.zeros(2), "path": pathlib.PurePosixPath("/a")}, tmp_path / "w.pt")
    errors = []

    def load():
        try:
            for _ in range(20):
                load_torch_weights(tmp_path / "w.pt")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_other_objects_are_refused_by_name_and_not_run(tmp_path):
    class Hostile:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    torch.save({"weight": torch.zeros(2), "hostile": Hostile()}, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt asks for objects that could run code: posix\.mkdir"):
        load_torch_weights(tmp_path / "w.pt")
    assert not (tmp_path / "executed").exists()


def test_whole_pickled_modules_are_refused_by_name(tmp_path):
    torch.save(nn.Linear(2, 3), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"torch\.nn\.modules\.linear\.Linear"):
        load_torch_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("content", [[torch.zeros(2)], {}, {"epoch": 3}, torch.zeros(2)])
def test_files_without_named_tensors_are_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"w\.pt (holds a|has no tensors)"):
        load_torch_weights(tmp_path / "w.pt")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_weights_are_refused(tmp_path, wenet_digits, share):
    content = (wenet_digits / "final.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"w\.pt.*(truncated|etch it again)"):
        load_torch_weights(tmp_path / "w.pt")


def test_legacy_files_are_refused(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "w.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="legacy torch format"):
        load_torch_weights(tmp_path / "w.pt")


def test_safetensors(tmp_path):
    weights = {"a": torch.randn(2, 3), "b": torch.randn(4).bfloat16()}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = load_safetensors(tmp_path / "w.safetensors")
    assert sorted(loaded) == ["a", "b"]
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    content = (tmp_path / "w.safetensors").read_bytes()
    (tmp_path / "w.safetensors").write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        load_safetensors(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match=r"missing\.safetensors cannot be read"):
        load_safetensors(tmp_path / "missing.safetensors")
