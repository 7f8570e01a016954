"""Recorded features: layer sites, the cache, its encoding, its tiers and its size."""
