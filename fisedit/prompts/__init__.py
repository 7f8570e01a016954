"""Prompts as text: how they change, what their words mean, weights and chunks. Knows no model."""
