"""What a machine takes for a model: calibration, plans, profiles, and what slows it down."""
