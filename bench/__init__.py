"""Measurements; see docs/measuring.md. Not part of the installed package."""
