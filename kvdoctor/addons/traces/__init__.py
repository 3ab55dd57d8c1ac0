"""The caller's own loop: a recorded trace is read, compared with the cache contract, and run again in the worker.

`recorded` has the types of a trace, `recording` writes one from inside a program, `read` parses its files, `step`
derives what each past must be, `rules` has what a step must keep, `check` walks over the steps, `replay` is the
experiment that runs them again, and `describe` writes the text. All of these need the standard library, numpy and
`decode` only, since the worker loads them. `step_test` brings the trace into a step-test, `checks` judge it.
"""
