"""The search on the GPU: which backend is chosen, and its results, in a process where Triton interprets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oasr_core.errors import ConfigError
from oasr_wfst.backends import build_decoder
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import FINAL, graph_from_arcs
from oasr_wfst.options import CtcWfstOptions

GRAPH = graph_from_arcs([(0, 0, 0, 0.0, [1]), (0, 1, FINAL, 0.0, [])], 2)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def build(backend, device):
    return build_decoder(GRAPH, CtcWfstOptions(backend=backend, search_beam=7.0), 0, 1, device)


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.fixture
def built(monkeypatch):
    """The settings of the Triton decoders that are built, on a machine without a GPU."""
    triton_search = pytest.importorskip("oasr_wfst.triton_search")
    calls = []
    monkeypatch.setattr(
        triton_search, "TritonDecoder", lambda graph, rules, **settings: calls.append((graph, rules, settings))
    )
    return calls


def interpreted(marks):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    cases = Path(__file__).parent / "triton_cases.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, str(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_equals_the_compiled_search():
    pytest.importorskip("triton")
    assert interpreted("not slow") > 10


@pytest.mark.slow
def test_without_a_beam_equals_the_reference():
    pytest.importorskip("triton")
    assert interpreted("slow") == 2


def test_auto_follows_the_model(built):
    assert type(build("auto", CPU)) is Decoder
    build("auto", CUDA)
    build("triton", CUDA)
    assert [(rules.search_beam, settings["device"]) for _, rules, settings in built] == [(7.0, CUDA)] * 2
    assert type(build("cpu", CUDA)) is Decoder


def test_auto_says_that_triton_is_missing(no_triton, caplog):
    assert type(build("auto", CUDA)) is Decoder
    assert "oasr-wfst[gpu]" in caplog.text
    assert type(build("auto", CPU)) is Decoder
    assert len(caplog.records) == 1


def test_triton_without_what_it_needs_is_refused(no_triton, monkeypatch):
    with pytest.raises(ConfigError, match="triton is not installed"):
        build("triton", CUDA)
    monkeypatch.undo()
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match="the model runs on cpu"):
        build("triton", CPU)
