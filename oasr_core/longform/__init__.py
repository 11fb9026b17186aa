"""One request of many windows: which are decoded when (plans), and how their outputs become one (stitching)."""
