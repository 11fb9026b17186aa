"""Feature frontends: waveforms to feature frames, for batches and for streams."""
