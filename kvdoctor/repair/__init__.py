"""From findings to a repaired and proved copy: repairs, lowering and export from a checkpoint.

`pipeline` is the table of contents of `re-export`, and `repairs` has one file for each repair. The user's files are
never written to, and nothing here knows the gate, the command line or a conversion, which is an add-on
(`addons/conversions`) and builds on this package.
"""
