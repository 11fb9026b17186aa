"""Tokenizers: unit ids to text, incrementally and whole."""
