"""WeNet U2/U2++ Conformer and Transformer models for OASR."""
