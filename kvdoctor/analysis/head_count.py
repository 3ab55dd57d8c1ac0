"""How many heads a cache has whose first axis counts batch times heads, where no config gives the number.

The graph gives it: for a number of sequences, only the right number of heads fits to the new keys and values.
"""

from dataclasses import replace

from kvdoctor.analysis.abstract_step import AbstractStep
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import CacheContract

MOST_HEADS = 128
"""Heads of one layer that are tried: the largest models known have 128."""


def count_heads(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the one number of heads for which a decode step returns the caches that it must."""
    if contract.heads or not any("batch_heads" in slot.axes for slot in contract.slots):
        return contract
    step = AbstractStep(decode)
    tried = (replace(contract, heads=heads) for heads in range(1, MOST_HEADS + 1))
    fitting = [one for one in tried if step.returns_caches(one)]
    if len(fitting) != 1:
        return contract
    said = f"{fitting[0].heads} heads for each sequence: with no other number do the sizes of a decode step agree"
    return replace(fitting[0], evidence=(*contract.evidence, said))
