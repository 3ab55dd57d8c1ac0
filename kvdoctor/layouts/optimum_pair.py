"""Optimum pair: Optimum's names as well, with both graphs of a pair in files of their own.

Requires: a pair as for `optimum`. Ensures: decoder_model.onnx and decoder_with_past_model.onnx, which does not return
the cross-attention cache: the caller holds it.
"""

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import Layout, optimum
from kvdoctor.layouts.joining import FIRST, LATER
from kvdoctor.stacks import StackFiles


def refuses(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot become such a pair."""
    if stack.kind != "pair":
        return "it is no pair; for a merged decoder use --layout pair, for a decoder that is one graph --layout optimum"
    return optimum.refuses(stack, contract)


LAYOUT = Layout(
    "optimum-pair",
    "the same with decoder and decoder_with_past",
    (FIRST, LATER),
    refuses,
    optimum.make_pair,
)
