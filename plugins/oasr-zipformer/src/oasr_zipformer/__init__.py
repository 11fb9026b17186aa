"""icefall Zipformer2 models."""
