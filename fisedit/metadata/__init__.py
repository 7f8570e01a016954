"""Metadata of image files: how a picture was made, and the form of its file. Knows no model."""
