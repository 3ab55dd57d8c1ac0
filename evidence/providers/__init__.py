"""Exports on other execution providers than the CPU."""
