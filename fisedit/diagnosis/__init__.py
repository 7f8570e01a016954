"""The time that a machine takes for a model: calibration, plans, profiles, and the causes of slowness."""
