"""Clips: one source, one region, and an edit for every drive of a sequence."""
