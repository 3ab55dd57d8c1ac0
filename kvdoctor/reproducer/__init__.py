"""`repro`: the smallest model without weights, and a script, that show a failure.

A `candidate` is a set of models with noise for weights, and a script of calls. `cuts`, `layers`, `weights` and `sizes`
make it smaller, `oracle` tells whether it still shows the failure, and `reduce` searches for the smallest one. `write`
and `program` write it to disk, and `pipeline` runs the result before it is given to the user.

Commands import `repro` and `ReproRequest` from `pipeline`. It must not import `gating`, `comparison` or `cli`.
"""
