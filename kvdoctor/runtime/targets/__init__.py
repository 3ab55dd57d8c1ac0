"""The runtimes and bindings that a model must run in, as `--target` names them, and what a stack showed under one.

A target is a release of onnxruntime, or a binding of another language that ships one: `onnxruntime==1.16.3`,
`ort-crate==2.0.0-rc.10`. What it promises is the table of limits, what was observed is a `TargetResult`.
"""

import re
from collections.abc import Iterable
from dataclasses import field
from typing import TYPE_CHECKING, Literal

from kvdoctor.choices import CPU
from kvdoctor.decode.runs import WRONG, FaultLocation, LogitsDifference, Run
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.errors import UsageError, similar_names
from kvdoctor.records import record
from kvdoctor.runtime.targets import bindings
from kvdoctor.runtime.targets.bindings import Hazard
from kvdoctor.runtime.targets.limits import Meaning, ReleaseLimits, limits_of, releases

if TYPE_CHECKING:
    from kvdoctor.decode.messages import FileRefused, NodesPlaced

RUNTIME = "onnxruntime"
WHOLE = re.compile(r"[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}", re.ASCII)
EXAMPLES = "onnxruntime==1.16.3 or ort-crate==2.0.0-rc.10"


@record
class Target:
    """A runtime that a model must run in.

    `asked` is what the user wrote, with the name as it is usually spelt, and `onnxruntime` the release that it means.
    `measured` is what a release beyond the table was seen to take, where it was asked. With another `provider` than the
    CPU it is the local runtime on that provider: `adapter` is the device, and `software` says that it is emulated.
    """

    asked: str
    onnxruntime: str
    hazards: tuple[Hazard, ...] = ()
    measured: ReleaseLimits | None = field(default=None, compare=False)
    provider: str = CPU
    adapter: str = ""
    software: bool = False

    @property
    def runtime(self) -> str:
        """The runtime as runs name it: `onnxruntime==1.22.0`."""
        return f"{RUNTIME}=={self.onnxruntime}"

    @property
    def ran_on(self) -> str:
        """The provider as runs name it: with the driver, where one was asked for."""
        _, at, driver = self.asked.partition("@")
        return f"{self.provider}{at}{driver}" if self.provider != CPU else CPU

    @property
    def words(self) -> str:
        """What was asked for, and the runtime in it where that has another name, or the adapter of a provider."""
        if self.provider != CPU:
            return self.asked + (f" on {self.adapter}" if self.adapter else "")
        return self.asked if self.asked == self.runtime else f"{self.asked} ({self.runtime})"

    @property
    def limits(self) -> ReleaseLimits | None:
        """What was measured of its release; None where that is beyond the table and was not asked itself."""
        return limits_of(self.onnxruntime) or self.measured

    def is_after(self, change: Meaning) -> bool | None:
        """Whether its release has the new meaning; None between the two releases that were measured."""
        if order(change.last) < order(self.onnxruntime) < order(change.since):
            return None
        return order(self.onnxruntime) >= order(change.since)

    def hazard(self, kind: bindings.Kind) -> Hazard | None:
        """The fault of that kind that this release of the binding still has."""
        return next((hazard for hazard in self.hazards if hazard.kind == kind), None)


def of_release(release: str) -> Target:
    """The runtime of that release itself."""
    return Target(f"{RUNTIME}=={release}", release)


def parse_targets(given: Iterable[str]) -> tuple[Target, ...]:
    """Read what `--target` was given; who names one twice gets it once.

    Raises:
        UsageError: something is no target; the message names the nearest that is one.
    """
    return tuple(dict.fromkeys(parse_target(one) for one in given))


def parse_target(given: str) -> Target:
    """Read one target.

    Raises:
        UsageError: it is none.
    """
    name, separator, release = (part.strip() for part in given.partition("=="))
    if not separator or not release:
        raise UsageError(f"it takes NAME==RELEASE, as in {EXAMPLES}; got {given!r}")
    binding = bindings.find(name)
    if binding is None:
        raise UsageError(f"there is no runtime or binding {name!r}; {_nearest_name(name)}")
    if binding.follows_runtime:
        return Target(f"{binding.name}=={release}", _whole_release(binding.name, release), ())
    onnxruntime = binding.ships.get(release)
    if onnxruntime is None:
        raise UsageError(
            f"it is not known which onnxruntime {binding.name} {release} ships; {_nearest_release(binding, release)}"
        )
    hazards = tuple(hazard for hazard, faulty in binding.hazards if release in faulty)
    return Target(f"{binding.name}=={release}", onnxruntime, hazards)


def _whole_release(name: str, release: str) -> str:
    """The number of a release that can have been, in three parts."""
    if not WHOLE.fullmatch(release):
        of_that_line = [known for known in releases() if known.startswith(f"{release}.")]
        near = of_that_line or similar_names(release, releases()) or [releases()[-1]]
        raise UsageError(f"it takes a whole release of {name}, as in {name}=={near[-1]}; got {release!r}")
    if order(release) < order(releases()[0]):
        raise UsageError(f"{name} {release} is older than what kvdoctor can run; the oldest is {name}=={releases()[0]}")
    lines = {line(known) for known in releases()}
    if line(release) not in lines and order(release) < order(releases()[-1]):
        near = similar_names(release, releases(), cutoff=0.0)
        raise UsageError(f"there is no {name} {release}; did you mean {name}=={near[0]}?")
    return release


def order(release: str) -> tuple[int, ...]:
    """A release as numbers that can be compared."""
    return tuple(int(part) for part in release.split("."))


def line(release: str) -> str:
    """The line of a release, which its patches share: `1.16` of `1.16.3`."""
    return release.rpartition(".")[0]


def _nearest_name(name: str) -> str:
    by_word = {word.lower(): one.name for one in bindings.BINDINGS for word in (one.name, *one.also)}
    close, known = similar_names(name.lower(), by_word, cutoff=0.5), ", ".join(one.name for one in bindings.BINDINGS)
    return f"did you mean {by_word[close[0]]}?" if close else f"it takes {known}"


def _nearest_release(binding: bindings.Binding, release: str) -> str:
    close = similar_names(release, binding.ships, most=3, cutoff=0.3) or list(binding.ships)[-3:]
    known = ", ".join(f"{binding.name}=={each}" for each in sorted(close))
    return f"name the runtime itself, as in onnxruntime=={releases()[-1]}, or one of {known}"


@record
class LogitsGap:
    """The first step of an experiment whose logits under the target differ from the local ones, and by how much.

    `difference` is None where the target takes no tokens after the step, and the local runtime does.
    `location` is where a provider departs from the CPU, if that was looked for; `no_location` why it was not found.
    """

    step: int
    difference: LogitsDifference | None
    verdict: Literal["ambiguous", "fail"]
    location: FaultLocation | None = None
    no_location: str | None = None


@record
class TargetResult:
    """One stack under one target.

    `gaps` are, by experiment, differences between the logits of the local runtime and the target, beyond noise.
    `is_local` says that the target is the runtime of this Python. `not_run` is the reason why nothing was run there.

    On another provider, `tolerance` is that of the provider, from the `noise` of first calls in standard deviations of
    the logits; `placed` says which nodes ran there, and `agreed` that another adapter departs in the same experiment.
    """

    target: Target
    runs: tuple[Run, ...] = ()
    refusals: "tuple[FileRefused, ...]" = ()
    gaps: dict[str, LogitsGap] = field(default_factory=dict)
    is_local: bool = False
    not_run: str | None = None
    tolerance: Tolerance | None = None
    noise: float | None = None
    placed: "tuple[NodesPlaced, ...]" = ()
    agreed: bool = False

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
            (next(iter(r.errors.values()), "") for r in self.refusals if r.file == file and r.opens_at is None), None
        )


def list_wrong_runs(here: Iterable[Run], there: Iterable[Run], on_provider: bool) -> list[Run]:
    """The runs that go wrong elsewhere and not here. On a provider, what the CPU runs must run, right or not."""
    outcomes = {run.experiment: run.outcome for run in here}
    right = {name for name, outcome in outcomes.items() if outcome not in (*WRONG, "skipped")}
    ran = right | {name for name, outcome in outcomes.items() if outcome == "differs" and on_provider}
    wrong = (run for run in there if run.outcome in WRONG)
    return [run for run in wrong if run.experiment in (ran if run.outcome in ("failed", "died") else right)]
