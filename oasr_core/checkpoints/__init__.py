"""Checkpoints: looking into them, converting, loading, and the native format."""
