"""What one stack showed under a target: promised is the table of limits, observed is this."""

from dataclasses import field
from typing import Literal

from kvdoctor.decode.runs import LogitsDifference, Run
from kvdoctor.records import record
from kvdoctor.runtime.targets import Target

Refused = tuple[str, dict[str, str], str | None]
"""A file that the runtime did not open: its name, the runtime's text by level, the level that opens it."""


@record
class LogitsGap:
    """The first step of an experiment whose logits under the target differ from the local ones, and by how much."""

    step: int
    difference: LogitsDifference | None
    verdict: Literal["ambiguous", "fail"]


@record
class TargetResult:
    """One stack under one target.

    `gaps` are, by experiment, differences between the logits of the local runtime and the target, beyond noise.
    `is_local` says that the target is the runtime of this Python. `not_run` is the reason why nothing was run there.
    """

    target: Target
    runs: tuple[Run, ...] = ()
    refusals: tuple[Refused, ...] = ()
    gaps: dict[str, LogitsGap] = field(default_factory=dict)
    is_local: bool = False
    not_run: str | None = None

    def run(self, experiment: str) -> Run | None:
        """The run of that experiment."""
        return next((run for run in self.runs if run.experiment == experiment), None)

    @property
    def took_steps(self) -> bool:
        """Whether any call got through: then the files that it needed were opened."""
        return any(step.returned for run in self.runs for step in run.steps)

    def refused(self, file: str) -> str | None:
        """The runtime's text where it opens a file at no level."""
        return next(
            (next(iter(errors.values()), "") for name, errors, at in self.refusals if name == file and at is None), None
        )
