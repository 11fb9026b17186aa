"""CTC decoding for OASR: the decode strategy ``ctc``."""
