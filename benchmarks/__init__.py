"""The measurements of speed, fidelity, masks and quality, and the truth that they are held to."""
