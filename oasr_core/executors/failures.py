"""How a contained failure is told: stage, memory or not, and the terminal output."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from oasr_core.errors import CachePoolExhausted
from oasr_core.request import Request, RequestOutput

logger = logging.getLogger(__name__)

#: How memory that ran out reads where it comes as a plain ``RuntimeError``.
_MEMORY_SIGNS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on any device."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError, CachePoolExhausted)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _MEMORY_SIGNS)


def failed(requests: Sequence[Request], stage: str, error: BaseException) -> list[RequestOutput]:
    """Terminal outputs for requests that failed together; the traceback is logged once."""
    ids = ", ".join(request.request_id for request in requests)
    logger.error("%s failed for %s", stage, ids, exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return [
        RequestOutput(
            request_id=request.request_id, finished=True, finish_reason="error", error_stage=stage, error=message
        )
        for request in requests
    ]
