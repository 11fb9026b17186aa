"""Models: what a network declares (:mod:`oasr_core.models.base`) and the layers it is built from."""
