"""Decode strategies' contract (``base``), their options, and words cut out of token timings (``alignment``)."""
