"""Which implementation searches."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Final

import torch

from oasr_core.errors import ConfigError
from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import Graph
from oasr_wfst.options import CtcWfstOptions

logger = logging.getLogger(__name__)

_NEEDS: Final = (
    "backend='triton' of strategy 'ctc_wfst' needs the package triton (pip install 'oasr-wfst[gpu]') and a model on a "
    "CUDA device"
)


def build_decoder(graph: Graph, options: CtcWfstOptions, blank: int, threads: int, device: torch.device) -> Decoder:
    """The decoder that ``options.backend`` names, for log posteriors on ``device``.

    Raises ``ConfigError`` where ``triton`` is named and Triton is not installed, or cannot compile for ``device``.
    """
    rules = BeamRules(options.search_beam, options.min_active_states, options.max_active_states)
    settings: dict[str, Any] = {
        "allow_partial": options.allow_partial,
        "output_beam": options.output_beam,
        "blank": blank,
        "blank_threshold": options.blank_threshold,
    }
    on_gpu = device.type == "cuda"
    if options.backend == "cpu" or (options.backend == "auto" and not (on_gpu and _has_triton())):
        if on_gpu and options.backend == "auto":
            logger.warning("ctc_wfst searches on the CPU, for triton is not installed: pip install 'oasr-wfst[gpu]'")
        return Decoder(graph, rules, threads=threads, **settings)
    if not _has_triton():
        raise ConfigError(f"{_NEEDS}; triton is not installed. Install it, or set backend='cpu'.")
    # Imported late: Triton is optional, and takes its time.
    from oasr_wfst.triton_lanes import INTERPRETED
    from oasr_wfst.triton_search import TritonDecoder

    if not on_gpu and not INTERPRETED:
        raise ConfigError(
            f"{_NEEDS}; the model runs on {device}. Set device='cuda' or backend='cpu'; to try it without a GPU, "
            "slowly, set TRITON_INTERPRET=1 before Python starts."
        )
    return TritonDecoder(graph, rules, device=device, **settings)


def _has_triton() -> bool:
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return True
