"""Load, check, place and patch a diffusers model. Knows nothing of edits."""
