"""The caller's own loop: a recorded trace is read, compared with the cache contract, and run again in the worker.

`recorded` has the types of a trace, records one in a program and parses its files; `step` derives what each past must
be, `inputs`, `lengths` and `pasts` have the rules that a step must keep, `check` walks over the steps, and `replay` is
the experiment that runs them again. All of these need the standard library, numpy and `decode` only, since the worker
loads them. `step_test` brings the trace into a step-test, `checks` judge it.
"""
