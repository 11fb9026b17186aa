"""Transducer decoding for OASR: the decode strategy ``transducer``, and networks that model plugins build with."""
