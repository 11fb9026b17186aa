"""Audio buffers that the device can read directly: page-locked host memory within caps."""

from __future__ import annotations

import logging
import threading
import weakref

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class AudioBuffers:
    """Hands out float32 buffers; past either cap, or off CUDA, ordinary memory."""

    def __init__(self, device: torch.device, sample_rate: int, max_seconds: float, max_total_seconds: float) -> None:
        self._pin = device.type == "cuda"
        self._per_request = int(max_seconds * sample_rate)
        self._total = int(max_total_seconds * sample_rate)
        self._held = 0
        self._lock = threading.Lock()

    @property
    def pinned_samples(self) -> int:
        """Samples that are page-locked now."""
        return self._held

    def allocate(self, samples: int) -> Tensor:
        """A zeroed buffer of ``samples`` float32."""
        with self._lock:
            fits = samples <= self._per_request and self._held + samples <= self._total
            if not (self._pin and fits):
                return torch.zeros(samples)
            try:
                buffer = torch.zeros(samples, pin_memory=True)
            except RuntimeError as error:
                logger.warning("%d samples could not be page-locked (%s); ordinary memory is used", samples, error)
                return torch.zeros(samples)
            self._held += samples
        weakref.finalize(buffer, self._release, samples)
        return buffer

    def _release(self, samples: int) -> None:
        with self._lock:
            self._held -= samples
