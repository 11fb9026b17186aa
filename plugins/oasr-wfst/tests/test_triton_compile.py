"""Every kernel, as it is launched, becomes machine code for Ampere and Hopper; no GPU is needed for that."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasr_wfst.beam import DEFAULT_RULES
from oasr_wfst.graph import EPSILON, FINAL, graph_from_arcs
from oasr_wfst.tokens import Arcs

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from oasr_wfst import triton_kernels, triton_lanes  # noqa: E402

POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64"}


class Launches:
    """Stands in for a kernel and remembers how it is launched."""

    def __init__(self, kernel, launches):
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args, **named: self.launches.append((self.kernel, args, named))


@pytest.fixture
def launches(monkeypatch):
    """``(kernel, arguments, named arguments)`` of one frame of a graph without epsilons and one with some."""
    found = []
    for name in ("begin_frame", "expand", "end_frame"):
        monkeypatch.setattr(triton_kernels, name, Launches(getattr(triton_kernels, name), found))
    arcs = [(0, 1, 0, 0.0, []), (1, 2, FINAL, 0.0, [])]
    for more in ([], [(0, 1, EPSILON, 0.0, [])]):
        graph = triton_lanes.DeviceGraph.of(Arcs.of(graph_from_arcs(arcs + more, 3)), torch.device("cpu"))
        lanes = triton_lanes.Lanes(graph, DEFAULT_RULES, 1, 16)
        load = triton_lanes.Load(np.zeros(1, np.int32), np.zeros(1), 8.0, 0, False, 1, 0, np.zeros(1, np.int64))
        lanes._put([load])
        lanes._search_frame(1, torch.zeros(1, 1))
    return found


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile(capability, launches, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    variants = set()
    for kernel, args, named in launches:
        options = {name: named[name] for name in triton_lanes.COMPILE_OPTIONS}
        constants = {name: value for name, value in named.items() if name not in options}
        names = [name for name in kernel.arg_names if name not in constants]
        types = [POINTERS[arg.dtype] if isinstance(arg, torch.Tensor) else "i32" for arg in args]
        signature = dict(zip(names, types, strict=True)) | dict.fromkeys(constants, "constexpr")
        variant = (kernel.__name__, *sorted(constants.items()))
        if variant in variants:
            continue
        variants.add(variant)
        source = ASTSource(kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert len(compiled.asm["cubin"]) > 1000
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        # The beam is rounded as on the processor.
        assert "fma.rn.f64" not in compiled.asm["ptx"]
    # One beginning, six phases, and the end with and without epsilons.
    assert len(variants) == 9
