"""Schedulers, inversion and the two denoising loops over a trajectory. Knows no words and no pictures."""
