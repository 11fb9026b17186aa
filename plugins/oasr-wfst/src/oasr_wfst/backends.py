"""Which implementation searches."""

from __future__ import annotations

from oasr_core.errors import ConfigError
from oasr_wfst.beam import BeamRules
from oasr_wfst.decoder import Decoder
from oasr_wfst.graph import Graph
from oasr_wfst.options import CtcWfstOptions


def build_decoder(graph: Graph, options: CtcWfstOptions, blank: int, threads: int) -> Decoder:
    """The decoder that ``options.backend`` names; ``ConfigError`` where it is not to be had."""
    if options.backend == "triton":
        raise ConfigError(
            "backend='triton' of strategy 'ctc_wfst' is not available in this version; set backend='cpu'."
        )
    return Decoder(
        graph,
        BeamRules(options.search_beam, options.min_active_states, options.max_active_states),
        allow_partial=options.allow_partial,
        output_beam=options.output_beam,
        blank=blank,
        blank_threshold=options.blank_threshold,
        threads=threads,
    )
