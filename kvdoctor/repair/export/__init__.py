"""Export from a checkpoint: an exporter is chosen, run in a Python of its own, and its result repaired and proved.

`pipeline` is the table of contents, `exporters` has all exporters and lists what is installed, `run_exporter` runs one.
Only `scripts` imports frameworks; the scripts run in a Python of their own and import nothing of kvdoctor.
"""
