"""The command line: one file for each group of commands, which parses, calls the API, prints and exits.

`main` has the group and the exit codes, `options` makes click's options from the table in `kvdoctor.options`, `output`
prints and writes. Only this package imports click. It must not read, run or judge a model by itself.
"""
