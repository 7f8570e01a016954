"""Two prompts and a trajectory to a mask: where an edit paints."""
