"""Where speech is and where long audio may be cut (axis ``oasr.segmenters``), and the gate for silence."""
