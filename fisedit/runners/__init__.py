"""Execution of sparse steps and decodes: eager, or captured graphs over static rows."""
