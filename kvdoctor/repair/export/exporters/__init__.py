"""Exporters: one file each, with the packages it needs, the layouts it writes and the flags it takes.

`registry` finds every module here that defines `EXPORTER`. None of them imports a framework: `../scripts/run.py` does
the export in a Python of its own, with the script that the exporter names.
"""
