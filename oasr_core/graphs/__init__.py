"""Graph capture behind one contract."""
