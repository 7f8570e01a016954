"""What is measured, and the truth that it is held to: speed, fidelity, masks and quality."""
