"""Latents to a picture: dense and sparse decodes, and compositing into the source."""
