"""`repro`: the smallest model without weights, and a script, that show a failure.

A candidate is a set of models with noise for weights, and a script of calls. `layers` and `weights` make it smaller,
`oracle` decides whether it still shows the failure, and `reduce` searches for the smallest one. `write` writes it to
disk, and `pipeline` runs the result before it is given to the user.

`messages` has the script, the record of the calls, which `worker/` writes and plays. It must not know another add-on,
or the gate.
"""

TAKES = {"repro": ("run",)}
"""What its commands take of the core's options (`kvdoctor.options`)."""
