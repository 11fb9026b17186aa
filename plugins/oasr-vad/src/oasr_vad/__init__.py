"""Voice activity detection for OASR: silero-vad's network, run with onnxruntime."""
