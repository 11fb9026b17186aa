"""WFST decoding for OASR: graph images, loaders, graph building and beam search over graphs."""
