"""The options of `diff`."""

from kvdoctor.choices import AGREE, Agree, Choice, Flag
from kvdoctor.options import option
from kvdoctor.records import record


@record
class DiffChoices:
    """The options of `diff` alone."""

    static: bool = option(Flag(), False, "Compare contract and graph, and run nothing.", ("diff",))
    agree: Agree | None = option(
        Choice.of(AGREE),
        None,
        "Call B worse unless its logits on the same feeds agree with A's this closely: in the likeliest tokens, "
        "within the tolerance of the arithmetic, or bit for bit.",
        ("diff",),
        unset="report differences of the logits, and decide nothing by them",
    )


STRUCTS = (DiffChoices,)
