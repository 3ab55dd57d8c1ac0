"""From a model to its findings: contract and runs are read, checks are asked, faults are located.

`pipeline` is the table of contents, `checks` has one file for each fault, `locate` finds the node at fault, `float32`
tells rounding from a fault. It must not know repairs: whoever knows them passes in a function that checks advice.
"""
