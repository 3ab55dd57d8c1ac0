"""The option of a step-test that gives the steps of the caller's own loop."""

from kvdoctor.choices import File
from kvdoctor.options import INPUT, option
from kvdoctor.records import record


@record
class TraceChoices:
    """The caller's own loop."""

    trace: str | None = option(
        File(),
        None,
        "Check the recorded steps of your own loop against the contract, and run them again (docs/trace.md).",
        ("step-test",),
        reported="if set",
        group=INPUT,
    )


STRUCTS = (TraceChoices,)
