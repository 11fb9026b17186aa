"""Page-locked audio buffers: caps, fallback and return, with the page-lock itself played by ordinary memory."""

from __future__ import annotations

import gc
import logging

import pytest
import torch

from oasr_core.frontend import pinned
from oasr_core.frontend.pinned import AudioBuffers

CUDA = torch.device("cuda")


@pytest.fixture
def locks(monkeypatch):
    """Lets ``pin_memory`` be asked for without a GPU; set ``locks.fail`` to make it fail."""

    class Locks:
        def __init__(self):
            self.fail = False
            self.sizes = []

    state = Locks()
    original = torch.zeros

    def zeros(*shape, pin_memory=False, **kwargs):
        if pin_memory:
            if state.fail:
                raise RuntimeError("cudaHostAlloc failed")
            state.sizes.append(shape[0])
        return original(*shape, **kwargs)

    monkeypatch.setattr(pinned.torch, "zeros", zeros)
    return state


def test_nothing_is_locked_without_cuda(locks):
    buffers = AudioBuffers(torch.device("cpu"), 16000, 300, 3600)
    assert buffers.allocate(100).shape == (100,)
    assert locks.sizes == []


def test_a_request_past_its_cap_gets_ordinary_memory(locks):
    buffers = AudioBuffers(CUDA, 100, max_seconds=2, max_total_seconds=100)
    kept = [buffers.allocate(200), buffers.allocate(201)]
    assert locks.sizes == [200]
    assert [len(buffer) for buffer in kept] == [200, 201]


def test_the_total_cap_and_the_return(locks):
    buffers = AudioBuffers(CUDA, 100, max_seconds=10, max_total_seconds=10)
    first, second = buffers.allocate(600), buffers.allocate(600)
    assert (locks.sizes, buffers.pinned_samples) == ([600], 600)
    del first
    gc.collect()
    assert buffers.pinned_samples == 0
    third = buffers.allocate(600)
    assert (locks.sizes, buffers.pinned_samples) == ([600, 600], 600)
    del second, third


def test_a_failed_lock_gives_ordinary_memory_and_is_tried_again(locks, caplog):
    buffers = AudioBuffers(CUDA, 100, max_seconds=10, max_total_seconds=100)
    locks.fail = True
    with caplog.at_level(logging.WARNING):
        assert len(buffers.allocate(50)) == 50
    assert "could not be page-locked (cudaHostAlloc failed)" in caplog.text
    assert buffers.pinned_samples == 0
    locks.fail = False
    kept = buffers.allocate(50)
    assert (locks.sizes, len(kept)) == ([50], 50)
