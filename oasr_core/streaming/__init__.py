"""Streaming encoder backends: they drive a step and own no memory."""
