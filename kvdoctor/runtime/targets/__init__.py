"""The runtimes and bindings that a model must run in, as `--target` names them, and what a stack showed under one.

A target is a release of onnxruntime, or a binding of another language that ships one: `onnxruntime==1.16.3`,
`ort-crate==2.0.0-rc.10`. What it promises is the table of limits, what was observed is a `TargetResult`. Of a binding
only what a source says stands here. One that loads whatever library it finds (onnxruntime_go, C, C++) ships none: name
the runtime itself.
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
from kvdoctor.runtime.targets.limits import Meaning, ReleaseLimits, limits_of, releases

if TYPE_CHECKING:
    from kvdoctor.decode.messages import FileRefused, NodesPlaced


Kind = Literal["reads-empty", "makes-empty"]
"""What a release of a binding cannot do with a tensor without elements: read one that comes out, make one to feed."""


@record
class Hazard:
    """A fault of a binding: what happens, and the first release without it."""

    kind: Kind
    words: str
    fixed_in: str


@record(slots=False)
class Binding:
    """A binding by the name that people use for it, and other spellings.

    `ships` maps releases, from old to new, to the onnxruntime inside. One that `follows_runtime` has the numbers of the
    runtime. `source` says where the numbers are from. `hazards` are faults with the releases that have them.
    """

    name: str
    source: str
    also: tuple[str, ...] = ()
    ships: dict[str, str] = field(default_factory=dict)
    hazards: tuple[tuple[Hazard, tuple[str, ...]], ...] = ()

    @property
    def follows_runtime(self) -> bool:
        """Whether its releases are numbered as those of the runtime."""
        return not self.ships


ORT_CRATE = {
    # The crates of the 1.x line bear the numbers of the runtime's line; the build script of the 1.15 one names 1.15.1.
    # Where the patches of the two differ the limits do not.
    **dict.fromkeys(("1.15.0", "1.15.1", "1.15.2", "1.15.3"), "1.15.1"),
    **dict.fromkeys(("1.16.0", "1.16.1", "1.16.2", "1.16.3"), "1.16.3"),
    "2.0.0-rc.0": "1.17.0",  # elixir-nx/ortex pull 25
    "2.0.0-rc.2": "1.17.3",  # release notes
    "2.0.0-rc.8": "1.19.2",  # ort-sys-2.0.0-rc.8/dist.txt
    "2.0.0-rc.9": "1.20.0",  # the archive that its build script fetches
    "2.0.0-rc.10": "1.22.0",  # pykeio/ort pull 393
    "2.0.0-rc.11": "1.23.2",  # description of the crate, badge of its README
    "2.0.0-rc.12": "1.24.2",  # description of the crate: 1.24
    "2.0.0-rc.13": "1.28.0",  # description of the crate, badge of its README
    "2.0.0-rc.14": "1.31.0",  # the same
    "2.0.0-rc.15": "1.31.0",  # the archives that ort-sys fetches
}
_CRATES = tuple(ORT_CRATE)
_BEFORE_RC10 = _CRATES[: _CRATES.index("2.0.0-rc.10")]
_UP_TO_RC12 = _CRATES[: _CRATES.index("2.0.0-rc.13")]


def _read_ships(pairs: str) -> dict[str, str]:
    """Releases of a binding, each with the runtime inside: `0.1.5=1.15.0 0.1.6=1.16.0`."""
    return {release: runtime for release, _, runtime in (pair.partition("=") for pair in pairs.split())}


ABORTS = Hazard(
    "reads-empty",
    "reading an output without elements aborts the process where undefined behavior is checked, as in debug builds",
    "2.0.0-rc.11",
)
"""Source: pykeio/ort issue 424; commits 1ab91a2 (rc.10) and ecca246 (rc.11)."""
REFUSES_TO_READ = Hazard("reads-empty", "reading an output without elements gives an error", "2.0.0-rc.11")
REFUSES_TO_MAKE = Hazard(
    "makes-empty", "a tensor with a dimension of 0 is refused when it is made from data", "2.0.0-rc.13"
)
"""Source: pykeio/ort commit e336d6b."""

BINDINGS = (
    Binding("onnxruntime", "PyPI", also=("onnxruntime-gpu", "onnxruntime-directml", "ort")),
    Binding(
        "ort-crate",
        "the crate `ort` of Rust (pykeio/ort)",
        also=("ort-rs", "pykeio-ort", "ort-sys", "rust-ort"),
        ships=ORT_CRATE,
        hazards=((REFUSES_TO_READ, _BEFORE_RC10), (ABORTS, ("2.0.0-rc.10",)), (REFUSES_TO_MAKE, _UP_TO_RC12)),
    ),
    Binding("onnxruntime-node", "npm: numbered as the runtime it holds"),
    Binding("onnxruntime-web", "npm: numbered as the runtime it is compiled from"),
    Binding("onnxruntime-react-native", "npm: numbered as the runtime it holds"),
    Binding(
        "Microsoft.ML.OnnxRuntime",
        "NuGet: numbered as the runtime it holds",
        also=("Microsoft.ML.OnnxRuntime.Gpu", "Microsoft.ML.OnnxRuntime.DirectML", "csharp", "nuget"),
    ),
    Binding(
        "com.microsoft.onnxruntime",
        "Maven: numbered as the runtime it holds",
        also=("com.microsoft.onnxruntime:onnxruntime", "com.microsoft.onnxruntime:onnxruntime-android", "java"),
    ),
    Binding(
        "transformers.js",
        "dependency onnxruntime-node of @huggingface/transformers and @xenova/transformers on npm",
        also=("@huggingface/transformers", "@xenova/transformers"),
        ships=_read_ships("3.0.0=1.19.2 3.3.3=1.20.1 3.5.2=1.21.0 3.7.6=1.21.0 3.8.1=1.21.0 4.0.0=1.24.3 4.3.1=1.30.0"),
    ),
    Binding(
        "onnxruntime-php",
        "CHANGELOG of ankane/onnxruntime-php",
        also=("ankane/onnxruntime",),
        ships=_read_ships(
            "0.1.5=1.15.0 0.1.6=1.16.0 0.1.7=1.16.0 0.1.8=1.16.0 0.2.0=1.17.0 "
            "0.2.1=1.18.0 0.2.2=1.19.2 0.2.3=1.19.2 0.2.4=1.20.0 0.2.5=1.21.0 0.2.6=1.21.0 0.2.7=1.22.0"
        ),
    ),
)


def find_binding(name: str) -> Binding | None:
    """The binding of that name, however it is spelt."""
    wanted = name.lower()
    return next((b for b in BINDINGS if wanted in map(str.lower, (b.name, *b.also))), None)


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

    def hazard(self, kind: Kind) -> Hazard | None:
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
    binding = find_binding(name)
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
    by_word = {word.lower(): one.name for one in BINDINGS for word in (one.name, *one.also)}
    close, known = similar_names(name.lower(), by_word, cutoff=0.5), ", ".join(one.name for one in BINDINGS)
    return f"did you mean {by_word[close[0]]}?" if close else f"it takes {known}"


def _nearest_release(binding: Binding, release: str) -> str:
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
