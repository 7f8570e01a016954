"""Interfaces of other libraries over the public face."""
