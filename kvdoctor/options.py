"""The table of options: each is one field of a struct below, and everything else is made from these fields.

That is: the options of the command line (`cli/options.py`) with their help, the checks of keyword arguments (`api.py`),
the keys of a policy (`gating/policy`), their table in docs/policy.md, and the `arguments` of a report. To add an
option, add a field; for the type checkers of callers, add its type to a TypedDict of `api.py` (a test compares them).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from kvdoctor import addons, choices
from kvdoctor.choices import (
    Choice,
    Consumer,
    Dtype,
    ExporterName,
    FailOn,
    File,
    Flag,
    Fusions,
    Kind,
    Names,
    Required,
    Whole,
)
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.analysis.memory import Workload
    from kvdoctor.findings import Selection
    from kvdoctor.runtime.process import Limits
    from kvdoctor.runtime.targets import Target

Struct = TypeVar("Struct")

GATES = ("gate", "baseline", "config")
RUNS = ("step-test", "re-export", "run", *GATES)
ALL = ("inspect", *RUNS)
FOLLOW_POLICY = ("inspect", "step-test", "policy", *GATES)
WORKER = ("speed", "worker")
READ = (*ALL, "speed", "feed")
MAY_DOWNLOAD = ("step-test", "re-export", "download", *GATES)
"""Groups of commands. An option belongs to a command on the command line and to its function in `api.py`.

`run`, `policy`, `worker`, `feed` and `download` stand for the commands of add-ons, which say in their `TAKES` what they
take.
"""

INPUT, CHECKS, REPAIR, FORM, BASELINE = "Input", "What to check", "Repair", "Form", "Known findings"
LIMITS, OUTPUT, OTHER = "Runtime and limits", "Output", "Other"
HELP_GROUPS = (INPUT, CHECKS, REPAIR, FORM, BASELINE, OUTPUT, LIMITS, OTHER)
"""The groups of options on a help page, in their order."""

MOST_SEQUENCES = 2**20
MOST_POSITIONS = 2**31 - 1


@record(kw_only=True)
class Option:
    """One option: the values that it takes, its meaning, and where it can be given.

    `keyword` is the name of the field and of the keyword argument. `flag` is the name on the command line, by default
    the keyword's; one that begins with `no-` switches off; None: not on the command line. `unset` describes what holds
    where the default is None. `policy` is an example of its line in a policy, empty if it is no key; a key that is set
    `once` stands in no override. `reported` says when a report contains it. `group` is its group on a help page.
    """

    kind: Kind
    default: Any = None
    help: str
    commands: tuple[str, ...] = ()
    keyword: str = ""
    flag: str | None = ""
    flag_help: str = ""
    metavar: str = ""
    unset: str = ""
    environment: str = ""
    policy: str = ""
    once: bool = False
    reported: Literal["always", "if set", "never"] = "never"
    group: str = CHECKS

    @property
    def key(self) -> str:
        """The name in a policy."""
        return self.keyword.replace("_", "-")

    @property
    def shown(self) -> str:
        """The name in messages: that of the command line, if it has one."""
        return self.key if self.flag is None else f"--{self.flag or self.key}"

    @property
    def for_runs(self) -> bool:
        """Whether only a run heeds it: `baseline`, which always runs models, takes it, and `inspect` does not."""
        return "baseline" in self.commands and {"inspect", "static"}.isdisjoint(self.commands)

    def read(self, given: Any) -> Any:
        """Check a keyword argument. Raises UsageError: it is no value of this option."""
        try:
            return self.kind.read(given)
        except choices.WrongValue as reason:
            raise UsageError(f"Invalid value for '{self.shown}': {reason}") from None


def option(kind: Kind, default: Any, meaning: str, commands: tuple[str, ...], **more: Any) -> Any:
    """Declare a field of a struct as an option; `more` are attributes of `Option`."""
    metadata = {"option": Option(kind=kind, default=default, help=meaning, commands=commands, **more)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def _check_codes(words: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a code that selects no check: a typing error must not make a gate green."""
    from kvdoctor.findings import why_no_check

    if (reason := why_no_check(words)) is not None:
        raise choices.WrongValue(reason)
    return words


def _check_uses(words: tuple[str, ...]) -> tuple[Required, ...]:
    unknown = next((word for word in words if word not in choices.REQUIRED), None)
    if unknown is not None:
        meant = did_you_mean(unknown, choices.REQUIRED)
        raise choices.WrongValue(
            f"it takes {', '.join(choices.REQUIRED)}; got {unknown!r}{'; ' if meant else ''}{meant}"
        )
    wanted = {*words, *(choices.RESTS_ON[use] for use in words if use in choices.RESTS_ON)}
    return tuple(use for use in choices.REQUIRED if use in wanted)


def _read_targets(words: tuple[str, ...]) -> "tuple[Target, ...]":
    from kvdoctor.runtime.targets import parse_targets

    try:
        return parse_targets(words)
    except UsageError as error:
        raise choices.WrongValue(str(error)) from None


def _read_providers(words: tuple[str, ...]) -> tuple[str, ...]:
    from kvdoctor.runtime.providers import read_provider

    try:
        for word in words:
            read_provider(word)
    except UsageError as error:
        raise choices.WrongValue(str(error)) from None
    return tuple(dict.fromkeys(words)) or (choices.CPU,)


class Tolerances(Kind):
    """Fractions of the standard deviation of the logits, by arithmetic."""

    def read(self, given: Any) -> dict[str, float]:
        """Accept a mapping within the bounds of `decode.tolerances`."""
        from kvdoctor.decode.tolerances import why_not

        if not isinstance(given, Mapping):
            self.refuse(given)
        if reason := next((reason for item in given.items() if (reason := why_not(*item)) is not None), None):
            raise choices.WrongValue(reason)
        return dict(given)


class Feeds(Names):
    """Constants for inputs by name: a mapping, or texts as in NAME=1.5."""

    def read(self, given: Any) -> dict[str, float]:
        """Accept a mapping of names and numbers, or texts of both."""
        if not isinstance(given, Mapping):
            pairs = [word.rpartition("=") for word in super().read(given)]
            if not all(name and value for name, _, value in pairs) or len({name for name, *_ in pairs}) < len(pairs):
                self.refuse(given)
            given = {name: _FLAGS.get(value.lower(), value) for name, _, value in pairs}
        try:
            found = {str(name): float(value) for name, value in given.items()}
        except (TypeError, ValueError):
            self.refuse(given)
        return found if all(map(math.isfinite, found.values())) else self.refuse(given)

    def check_toml(self, given: Any) -> None:
        """Accept a table of numbers."""
        self.read(given) if isinstance(given, Mapping) else self.refuse(given)

    def to_plain(self, value: Any) -> Any:
        """Return the mapping."""
        return value


class Allowed(Feeds):
    """What may stay unchecked, each with its reason: a mapping, or codes alone."""

    def read(self, given: Any) -> Any:
        """Accept a mapping of codes (`KV2-KV3` is a range) and reasons, or texts of codes that name checks."""
        found = given if isinstance(given, Mapping) else dict.fromkeys(Names.read(self, given), "on the command line")
        if not all(map(choices.is_text, (*found, *found.values()))):
            self.refuse(given)
        named = (word.replace("-KV", " KV").split() for word in found if word != "everything")
        _check_codes(tuple(part for parts in named for part in parts))
        return dict(found)


_FLAGS = {"true": 1.0, "false": 0.0}


def _list_codes() -> Iterable[str]:
    from kvdoctor.findings import all_checks

    return [word for check in all_checks() for word in (check.code, check.name)]


CODES = Names("a list of codes, prefixes or names", "CODES", make=_check_codes, known=_list_codes)
SEQUENCES = Whole.of(1, MOST_SEQUENCES)
POSITIONS = Whole.of(1, MOST_POSITIONS)

MODELS = Option(
    kind=Names("a list of patterns"),
    default=(),
    help="Check these models where no PATH is given.",
    keyword="models",
    flag=None,
    policy='models = ["exports/*"]',
    once=True,
)
"""The one key of a policy that is no option: the command line has arguments for it."""

_gate_run = partial(option, commands=GATES, group=LIMITS)
_baseline = partial(option, commands=("baseline",), group=BASELINE)
_repair = partial(option, commands=("re-export",), group=REPAIR)
_input = partial(option, commands=("step-test",), group=INPUT, reported="if set")
_planned = partial(_input, commands=("inspect",))
_checked = partial(option, commands=ALL, reported="always")
_if_set = partial(option, reported="if set")
_limit = partial(option, commands=(*RUNS, *WORKER), group=LIMITS)


@record
class GateChoices:
    """The options of `gate` that hold for all models together."""

    baseline: str | None = option(
        File(),
        None,
        "Do not count the findings that this file knows, each with its reason (docs/baseline.md).",
        ("gate", "config"),
        policy='baseline = "kvdoctor-baseline.json"',
        once=True,
    )
    exclude: tuple[str, ...] = option(
        Names("a list of patterns", "PATTERN"),
        (),
        "Leave out the models that match, and list them; a pattern without a slash matches a name at any depth.",
        (*GATES, "static"),
        policy='exclude = ["*-draft"]',
        once=True,
    )
    jobs: int | None = _gate_run(
        Whole.of(1),
        None,
        "Run this many models side by side.",
        unset="as many as cores and memory allow",
        policy="jobs = 2",
        once=True,
    )
    cache: bool = _gate_run(
        Flag(),
        True,
        "Skip models that have not changed since their last run.",
        flag="no-cache",
        flag_help="Run models again that have not changed since their last run.",
        policy="cache = false",
        once=True,
    )
    cache_dir: str | None = _gate_run(
        File("the path of a folder", "DIR"),
        None,
        "Keep the reports of unchanged models in this folder.",
        unset="the user's cache folder",
        environment="KVDOCTOR_CACHE_DIR",
    )
    cache_size: int = _gate_run(
        Whole.of(1, unit="MiB", metavar="MIB"),
        512,
        "Let that folder grow to this size; the reports that were not used for longest are removed.",
        policy="cache-size = 2048",
        once=True,
    )
    cluster: str | None = _gate_run(
        choices.Text("the address of a scheduler", "ADDRESS"),
        None,
        "Run the models on the Dask cluster of this scheduler, as in tcp://HOST:8786.",
    )
    static: bool = option(
        Flag(),
        False,
        "Read the files and run nothing. No model is called healthy; exit code 0 if nothing is found.",
        ("gate",),
    )
    by_folder: bool = option(
        Flag(), False, "Take each file for the whole export that it belongs to, and check each export once.", ("gate",)
    )


@record
class SpeedChoices:
    """The options of `speed` alone."""

    against: str | None = option(
        File(metavar="REPORT"),
        None,
        "Compare with this JSON report of `kvdoctor speed`; exit with code 1 if something got worse (docs/speed.md).",
        ("speed",),
        group=INPUT,
    )


@record
class BaselineChoices:
    """The options of `baseline` alone."""

    reason: str | None = _baseline(
        choices.Text("the reason why the findings may stay"),
        None,
        "Add the findings that count and are not known, for this reason.",
    )
    until: str | None = _baseline(
        choices.Day(), None, "With --reason: know the findings until this day, as in 2026-12-31."
    )
    prune: bool = _baseline(Flag(), False, "Remove findings that are not found any more, and models that are gone.")
    check: bool = _baseline(
        Flag(), False, "Write nothing; exit with code 1 if the file would change, or if a finding counts."
    )


CHECKPOINT = File("a folder or a model of the Hugging Face Hub", "CHECKPOINT")


@record
class ReExportChoices:
    """The options of `re-export` alone. `from_` is `--from`."""

    fix: tuple[str, ...] = _repair(
        Names(
            "names of repairs",
            "NAMES",
            if_empty="it names no repair; leave it out to use all of them (docs/repairs.md)",
        ),
        (),
        "Use only these repairs, by name (docs/repairs.md).",
    )
    keep_unproved: bool = _repair(Flag(), False, "Write OUT even if the repair could not be proved.")
    opset: int | None = _repair(
        Whole.of(7, 40), None, "With --from: export with opset N.", unset="that of the exporter"
    )
    from_: str | None = _repair(
        CHECKPOINT,
        None,
        "Export again from this PyTorch checkpoint: a folder, or a model of the Hugging Face Hub (uses the network).",
        flag="from",
    )
    exporter: ExporterName | None = _repair(
        Choice.of(choices.EXPORTERS),
        None,
        "With --from: export with this exporter.",
        unset="by the layout and the findings of PATH",
    )
    dtype: Dtype | None = _repair(
        Choice.of(choices.DTYPES),
        None,
        "With --from: export in this arithmetic.",
        unset="the arithmetic of PATH's cache, else fp32",
    )
    fusions: Fusions | None = _repair(
        Choice.of(choices.FUSIONS),
        None,
        "With --from and transformers: fuse operators for this execution provider.",
        unset="plain ONNX operators",
    )
    static_cache: int | None = _repair(
        Whole.of(2, 2**31 - 1),
        None,
        "With --from and transformers: a cache of N tokens that is written in place.",
        unset="a cache that grows",
    )
    task: str | None = _repair(
        choices.Text("the name of a task", "TASK"),
        None,
        "With --from and optimum: export for this task, by optimum's name.",
    )


@record
class Options:
    """The options of a diagnosis, with one meaning for every command that takes them.

    `progress` is called at the start of each experiment with its name, its number, counted from 1, and their count.
    `policy` is the file that the values come from, if they come from one. `added` are structs of add-ons, of which
    options are given.
    """

    contract: str | None = _input(
        File(), None, "Read the cache contract from here: `kvdoctor contract MODEL --format json`, edited by hand."
    )
    feed: Mapping[str, float] = _input(
        Feeds("a finite number, true or false for each name of an input, as in scale=1.5", "NAME=VALUE"),
        {},
        "Feed this constant to an input whose role the file does not show.",
        commands=READ,
        policy="feed = { scale = 1.5 }",
    )
    logits_output: str | None = _input(
        choices.Text("the name of an output", "NAME"),
        None,
        "Take the logits from this output.",
        commands=READ,
        policy='logits-output = "lm_logits"',
    )
    prompt_ids: tuple[int, ...] = _input(choices.Numbers(), (), "Begin with these token ids, as in 1,2,3.")
    inputs: str | None = _input(
        File(), None, "Read input_ids, encoder inputs and others without a known role by name from this .npz file."
    )
    reference: str | None = _input(
        CHECKPOINT,
        None,
        "Compare the logits with this PyTorch checkpoint: a folder, or a model of the Hugging Face Hub (uses the "
        "network).",
        commands=("step-test", "reference"),
    )
    against: str | None = _input(
        File(),
        None,
        "Compare logits and caches with the golden numbers that `kvdoctor record` wrote into this file "
        "(docs/golden.md).",
        commands=("step-test", *GATES),
        policy='against = "golden/marian.json"',
    )
    weights: bool = _planned(
        Flag(),
        False,
        "Read the values of the weights: name those that are zero, constant, not finite, too large or stored twice.",
    )
    batch: int | None = _planned(SEQUENCES, None, "Show the memory plan for N sequences; each beam is one.", unset="1")
    context: int | None = _planned(
        POSITIONS, None, "Show the memory plan for N tokens in each sequence.", unset="the value of the config"
    )
    encoder_length: int | None = _planned(
        POSITIONS, None, "Show the memory plan for N encoder states.", unset="the value of the graph or the config"
    )
    consumer: Consumer = _checked(
        Choice.of(choices.CONSUMERS),
        "plain",
        "Check the model for this loop: `plain` feeds every present back, `held` keeps the cross-attention cache "
        "of the prefill.",
        policy='consumer = "held"',
    )
    targets: "tuple[Target, ...]" = _if_set(
        Names("a list of runtimes", "SPEC", make=_read_targets, to_json=lambda found: [one.asked for one in found]),
        (),
        "Check the model for this runtime: onnxruntime==1.16.3, ort-crate==2.0.0-rc.10 (docs/targets.md).",
        ("inspect", *MAY_DOWNLOAD),
        flag="target",
        policy='targets = ["onnxruntime==1.16.3"]',
    )
    select: tuple[str, ...] = _checked(
        CODES,
        (),
        "Run only these checks: codes, prefixes or names, separated by commas.",
        policy='select = ["KV2", "KV3"]',
    )
    ignore: tuple[str, ...] = _checked(
        CODES,
        (),
        "Leave out these checks: codes, prefixes or names, separated by commas.",
        policy='ignore = ["names-mislead"]',
    )
    fail_on: FailOn = _checked(
        Choice(
            '"note", "warning", "error" or "never"; the first three with ":confirmed" or ":suspected" after it',
            "[note|warning|error|never][:confirmed|:suspected]",
            values=choices.FAIL_ON,
        ),
        "error",
        "Exit with code 1 from this severity on; with :confirmed never for a suspected finding, with :suspected for "
        "one of the next lower severity too.",
        commands=(*ALL, "speed", "findings"),
        policy='fail-on = "warning"',
    )
    require: tuple[Required, ...] = _if_set(
        Names("a list of uses", "USES", make=_check_uses, known=lambda: choices.REQUIRED),
        (),
        f"Make the findings of these uses errors; uses separated by commas: {', '.join(choices.REQUIRED)}.",
        ALL,
        policy='require = ["batch", "beam"]',
    )
    tolerances: Mapping[str, float] = _if_set(
        Tolerances("a table of arithmetics and fractions of the logits' standard deviation"),
        {},
        "Accept logits that differ by at most this fraction, where kvdoctor's own limit does not fit.",
        (*RUNS, "tolerances"),
        flag=None,
        policy="tolerances = { float16 = 0.03 }",
    )
    allow_incomplete: Mapping[str, str] = _if_set(
        Allowed("a table of codes, or everything, each with its reason", "CODES", known=_list_codes),
        {},
        "Do not exit with code 3 for these checks where they cannot run on this machine; the report says so.",
        (*GATES, "static"),
        policy='allow-incomplete = { KV404 = "no network here" }',
    )
    thorough: bool = _if_set(
        Flag(),
        False,
        "Also run the experiments that take long: the full context, other optimization levels.",
        RUNS,
        policy="thorough = true",
    )
    providers: tuple[str, ...] = _limit(
        Names("a list of execution providers", "NAME", make=_read_providers, to_json=list),
        (choices.CPU,),
        "Run on this execution provider as well, and compare both (docs/targets.md): webgpu, cuda, a library.",
        flag="provider",
        policy='providers = ["webgpu"]',
        reported="always",
    )
    seed: int = _limit(
        Whole.of(0), 0, "Seed the generator of all synthetic inputs.", commands=(*ALL, *WORKER), policy="seed = 7"
    )
    timeout: float = _limit(
        choices.Seconds(), 300.0, "Wait no longer than this for one answer of the runtime.", policy="timeout = 60"
    )
    max_memory: int | None = _limit(
        Whole.of(1, unit="MiB", metavar="MIB"),
        None,
        "Limit the resident memory of the runtime's process.",
        unset="nine tenths of the machine's memory",
        policy="max-memory = 4096",
    )
    sandbox: bool = _limit(
        Flag(),
        True,
        "Let the runtime's process read the model alone, and no network.",
        flag="no-sandbox",
        flag_help="Let the runtime's process read all files and use the network; by default it cannot, on Linux.",
    )
    hash: bool = option(
        Flag(), False, "Put the SHA-256 of each file into the report.", ALL, policy="hash = true", group=OUTPUT
    )
    offline: bool = _limit(
        Flag(), False, "Never use the network.", commands=(*ALL, *WORKER, "contract"), policy="offline = true"
    )
    progress: Callable[[str, int, int], None] | None = option(
        Kind("a function"), None, "Call this at the start of each experiment.", (*ALL, *WORKER), flag=None
    )
    policy: str | None = option(File(), None, "Follow this policy.", FOLLOW_POLICY, flag=None, reported="if set")
    added: tuple[Any, ...] = ()

    def of(self, struct: type[Struct]) -> Struct:
        """The options of an add-on, one of its structs; their defaults where none of them is given."""
        return next((one for one in self.added if isinstance(one, struct)), None) or struct()

    @property
    def selection(self) -> "Selection":
        """The checks that count."""
        from kvdoctor.findings import Selection

        return Selection(self.select, self.ignore)

    @property
    def limits(self) -> "Limits":
        """The limits of the worker process."""
        from kvdoctor.runtime.process import Limits

        return Limits(self.timeout, self.max_memory, self.sandbox)

    @property
    def provider(self) -> str:
        """The execution provider of jobs that run on one alone."""
        return self.providers[0]

    @property
    def load(self) -> "Workload":
        """The sizes that the memory plan is made for."""
        from kvdoctor.analysis.memory import Workload

        return Workload(self.batch, self.context, self.encoder_length)

    @property
    def show_line(self) -> Callable[[str], None] | None:
        """The function that shows any text, if `progress` has one: the line of a terminal has."""
        return getattr(self.progress, "say", None)

    def as_arguments(self) -> dict[str, Any]:
        """Return the options as a report shows them."""
        shown = {}
        all_options = ((struct, option) for struct in (self, *self.added) for option in table()[type(struct)])
        for struct, option in all_options:
            value = getattr(struct, option.keyword)
            if option.reported == "always" or (option.reported == "if set" and value != option.default):
                name = option.flag or option.keyword if option.keyword in ("targets", "providers") else option.keyword
                plain = option.kind.to_plain(value)
                shown[name] = ",".join(plain) if option.keyword == "providers" else plain
        if self.reference is not None or self.targets:  # the only uses of the network
            shown["offline"] = self.offline
        return shown


@cache
def table() -> dict[type[Any], tuple[Option, ...]]:
    """The options of each struct, in the order of its fields; those of the add-ons before what all commands share."""
    return {
        struct: tuple(replace(m["option"], keyword=one.name) for one in fields(struct) if (m := one.metadata))
        for struct in (BaselineChoices, SpeedChoices, GateChoices, ReExportChoices, *_list_added(), Options)
    }


def _list_added() -> tuple[type[Any], ...]:
    return tuple(struct for module in addons.modules("options") for struct in module.STRUCTS)


@cache
def options_of(command: str) -> tuple[Option, ...]:
    """Return the options that a command takes, its own first."""
    taken = {command, *addons.taken_options(command)}
    return tuple(option for options in table().values() for option in options if not taken.isdisjoint(option.commands))


@cache
def policy_options() -> tuple[Option, ...]:
    """Return the options that a policy may set."""
    return (MODELS, *(option for options in table().values() for option in options if option.policy))


def refuse_unknown(command: str, given: Iterable[str]) -> None:
    """Refuse keyword arguments that a command does not take.

    Raises:
        UsageError: with the name that was probably meant.
    """
    known = sorted(option.keyword for option in options_of(command))
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"it takes {', '.join(known)}"
            raise UsageError(f"{command.replace('-', '_')} has no option {name!r}; {hint}")


def refuse_for_runs(command: str, given: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that only a run heeds, for a call of a command that runs nothing.

    Raises:
        UsageError: one of them is given.
    """
    for option in options_of(command):
        if option.for_runs and given.get(option.keyword) not in (None, option.default):
            raise UsageError(f"{option.shown} is for models that are run, and --static runs none; leave one out")


def read_options(struct: type[Struct], given: Mapping[str, Any], command: str = "step-test") -> Struct:
    """Make a struct from keyword arguments. None stands for the default, and options of other structs are left alone.

    `Options` also holds the options that the add-ons have for the `command`.

    Raises:
        UsageError: a value is not one that its option takes, or no check is left to run.
    """
    values = {
        option.keyword: option.read(given[option.keyword])
        for option in table()[struct]
        if given.get(option.keyword) is not None
    }
    if values.get("select") or values.get("ignore"):
        from kvdoctor.findings import Selection, all_checks

        selection = Selection(values.get("select", ()), values.get("ignore", ()))
        if not any(selection.takes(check.code, check.name) for check in all_checks()):
            # It would call every model healthy.
            why = "no check is left by `select` and `ignore` (--select, --ignore, or these keys of the policy)"
            raise UsageError(f"{why}; `kvdoctor explain` lists all checks")
    if struct is Options:
        added = (read_options(one, given) for one in _list_added() if any(command in o.commands for o in table()[one]))
        values["added"] = tuple(choices for choices in added if choices != type(choices)())
    return struct(**values)
