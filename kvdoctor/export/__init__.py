"""Exporters' libraries behind doors: scripts that run in a Python of their own, and how that Python is come by."""
