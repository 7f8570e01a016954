"""The demo model's data, training and evaluation; the engine in `fisedit` never imports it."""
