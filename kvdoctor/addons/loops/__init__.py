"""Decode loops as projects: a program in the user's language, written from the cache contract, checked by running it.

Its two functions are `pipeline.write_loop` and `pipeline.check_loop`. It builds on the contract, the experiments and
the worker. It must not know the command line, reports of findings, or any exporter: all that a template prints is in
the `LoopPlan`, and all that is special to a language is in its folder below `languages/`.
"""

TAKES = {"loop": ("worker", "feed", "reference")}
"""What its command takes of the core's options (`kvdoctor.options`)."""
