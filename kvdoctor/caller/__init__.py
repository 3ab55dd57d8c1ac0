"""The caller's own loop: what a user's program fed and got, held against the contract, and run again here.

recorded: what a trace holds. reading, archives: a file to steps. moment: one step in its sequence. rules: what a step
must keep. holding: the walk over a trace. replay: the same steps in the worker. numpy and the standard library only.
"""
