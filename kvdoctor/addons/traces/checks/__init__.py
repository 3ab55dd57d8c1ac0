"""The checks of a caller's own loop: one file each, as in `diagnose/checks/`."""
