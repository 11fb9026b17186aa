"""What bounds the search. How the beam follows from it, frame by frame, is in :func:`oasr_wfst.search.next_beam`."""

from __future__ import annotations

from typing import NamedTuple


class BeamRules(NamedTuple):
    """Beams are differences of log scores; ``min_active`` and ``max_active`` count states."""

    search_beam: float = 20.0
    min_active: int = 30
    max_active: int = 10000


#: k2's usual values.
DEFAULT_RULES = BeamRules()
