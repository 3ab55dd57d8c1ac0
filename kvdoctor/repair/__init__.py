"""From findings to a repaired and proved copy: repairs, conversions, lowering and export from a checkpoint.

`pipeline` is the table of contents of `re-export`; `repairs`, `layouts` and `export/exporters` have one file for each
repair, layout and exporter. The user's files are never written to, and nothing here knows the gate or the command line.
"""
