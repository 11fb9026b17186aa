"""The table of axes against the project's own metadata, and what imports cost."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib

import pytest

from oasr_core.errors import UnknownPluginError
from oasr_core.registry import API_VERSIONS, AXES, registry

FOURTEEN = {
    "models": "oasr.models",
    "converters": "oasr.converters",
    "decode_strategies": "oasr.decode_strategies",
    "streaming_backends": "oasr.streaming_backends",
    "batching_policies": "oasr.batching_policies",
    "partition_policies": "oasr.partition_policies",
    "tokenizers": "oasr.tokenizers",
    "frontends": "oasr.frontends",
    "graph_backends": "oasr.graph_backends",
    "quantization": "oasr.quantization",
    "pretrained": "oasr.pretrained",
    "segmenters": "oasr.segmenters",
    "output_transforms": "oasr.output_transforms",
    "commands": "oasr.commands",
}


def test_every_axis_has_its_group_and_version():
    assert {name: axis.group for name, axis in AXES.items() if name != "observers"} == FOURTEEN
    assert AXES["observers"].group == "oasr"
    assert set(API_VERSIONS) == set(AXES)
    assert set(API_VERSIONS.values()) == {(1, 0)}


def test_every_group_that_our_distributions_declare_is_an_axis(repo_root):
    groups = {axis.group for axis in AXES.values()}
    for path in [repo_root / "pyproject.toml", *repo_root.glob("plugins/*/pyproject.toml")]:
        declared = tomllib.loads(path.read_text())["project"].get("entry-points", {})
        assert set(declared) <= groups, path


def test_unknown_axis_is_named_with_the_nearest():
    with pytest.raises(UnknownPluginError, match=r"No axis 'model'.*Did you mean 'models'"):
        registry("model")


def test_listing_and_the_package_import_neither_torch_nor_pydantic_nor_a_plugin():
    code = """
import json, sys
import oasr_core
assert "ASREngine" in dir(oasr_core)
from oasr_core.registry import registry, AXES
names = {axis: registry(axis).names() for axis in AXES}
plugins = [m for m in sys.modules if m.startswith("oasr_") and not m.startswith("oasr_core")]
heavy = [m for m in ("torch", "pydantic", "typer", "pluggy", "oasr_core.tokenizers.base") if m in sys.modules]
version = oasr_core.__version__
error = oasr_core.OasrError.__name__
print(json.dumps([names, plugins, heavy, version, error]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, plugins, heavy, version, error = json.loads(done.stdout)
    assert {"fcfs", "window"} <= set(names["batching_policies"])
    assert {"symbol_table", "sentencepiece"} <= set(names["tokenizers"])
    assert (plugins, heavy) == ([], [])
    assert version == "0.1.0"
    assert error == "OasrError"


def test_package_exports_resolve_and_unknown_ones_do_not():
    import oasr_core

    for name in ("DecodingOptions", "RequestOutput", "Segment", "WordTiming", "FeatureConfig", "register_tokenizer"):
        assert getattr(oasr_core, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        oasr_core.Engine  # noqa: B018
