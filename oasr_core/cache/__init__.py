"""Streaming state: paged attention history and fixed-extent slots, owned by one store."""
