"""What plugin authors (and OASR itself) test with: tiny models, scripted inputs, a fake clock, invariance checks."""
