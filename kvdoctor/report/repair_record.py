"""What a report says of a repair or an export: the changes, the proof, and what could not be repaired."""

from kvdoctor.findings import Finding
from kvdoctor.records import record
from kvdoctor.report.facts import Verdict


@record
class Change:
    """One change that a repair made.

    Attributes:
        file: the changed file.
        where: the location in its graph.
        before: the value before the repair.
        after: the value after the repair.
    """

    file: str
    where: str
    before: str
    after: str


@record
class Proof:
    """A claim about a repaired stack, and whether it holds.

    Attributes:
        stack: the stack.
        claim: the claim.
        holds: whether it holds.
        detail: its figures.
    """

    stack: str
    claim: str
    holds: bool
    detail: str = ""


@record
class RepairSide:
    """The verdict and the findings before a repair, or after it."""

    verdict: Verdict
    findings: tuple[Finding, ...]


@record
class AppliedRepair:
    """A repair that changed something.

    Attributes:
        stack: the stack that was repaired.
        name: the name of the repair.
        checks: the names of the checks whose findings it was applied for.
        keeps: how close the logits of the copy must be to the original's.
        summary: what the repair does.
    """

    stack: str
    name: str
    checks: tuple[str, ...]
    keeps: str
    summary: str


@record
class NotRepaired:
    """A finding that was not repaired in the graph.

    Attributes:
        stack: the stack of the finding.
        finding: the name of its check.
        repair: the repairs that could not be applied; empty if there is none for it.
        reason: why it could not be applied.
        instead: what to do instead.
    """

    stack: str | None
    finding: str
    repair: str
    reason: str
    instead: str = ""


@record
class ChangedFile:
    """A file of the copy that differs from the source.

    Attributes:
        path: its path in the output folder.
        before: the SHA-256 digest of the source file.
        after: the SHA-256 digest of the file in the output folder.
    """

    path: str
    before: str
    after: str


@record
class ExportChoice:
    """A setting of a new export, and its reason.

    Attributes:
        what: the setting.
        value: its value.
        because: what the value was derived from.
    """

    what: str
    value: str
    because: str


@record
class PortChange:
    """An input or output that differs from the replaced model.

    Attributes:
        file: the file.
        name: the name of the input or output.
        before: its type in the replaced model; null if it is new.
        after: its type in the new export; null if it was removed.
    """

    file: str
    name: str
    before: str | None
    after: str | None


@record
class ExportRecord:
    """How a model was exported again from its checkpoint.

    Attributes:
        checkpoint: the checkpoint.
        exporter: the exporter that was used.
        way: how its Python environment was made.
        requirements: the packages that it needs, with their versions.
        versions: the versions of the packages that were used.
        choices: the settings of the export, with reasons.
        failures: the attempts that failed before.
        findings: the findings on the new export before any repair.
        ports: inputs and outputs that differ from the replaced model.
        left_out: files that the exporter wrote and that the replaced model does not have.
        recipe: the folder in OUT with scripts, pinned versions, command and log.
    """

    checkpoint: str
    exporter: str
    way: str
    requirements: tuple[str, ...]
    versions: dict[str, str]
    choices: tuple[ExportChoice, ...]
    failures: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    ports: tuple[PortChange, ...] = ()
    left_out: tuple[str, ...] = ()
    recipe: str | None = None


@record
class CacheCost:
    """What one way of rounding the cache costs, measured on what the copy is compared with: a loop rounds its cache.

    Attributes:
        keys: what shares a scale among the keys: token (one token and head), channel, head, tensor; null if exact.
        values: the same of the values.
        layer: the layer that is rounded; null for all.
        divergence: the mean Kullback-Leibler divergence of the next-token distributions, in nats; null without figures.
        same_top1: the share of positions with the same likeliest token; null without figures.
        first_other: the first position, from 1 on, with another likeliest token; null if none.
        largest: the largest difference of the logits, in standard deviations of the logits; null without figures.
        reason: why there are no figures; null if there are.
    """

    keys: str | None
    values: str | None
    layer: int | None
    divergence: float | None = None
    same_top1: float | None = None
    first_other: int | None = None
    largest: float | None = None
    reason: str | None = None


@record
class CacheCosts:
    """What a narrower type of the cache costs.

    Attributes:
        stack: the stack.
        cache_type: the type: float16, int8 or int4.
        bytes_before: bytes that the cache of one token takes before; null if not known.
        bytes_after: the same in the narrower type, scales included.
        tokens: the positions whose logits were compared.
        costs: the ways of rounding; the first is the one that a copy has.
        sensitive_layers: the layers that cost most of it, which had better stay as they are; empty if none stands out.
        exact_layers: the layers that stay as they are.
    """

    stack: str
    cache_type: str
    bytes_before: int | None
    bytes_after: int | None
    tokens: int
    costs: tuple[CacheCost, ...]
    sensitive_layers: tuple[int, ...] = ()
    exact_layers: tuple[int, ...] = ()


@record
class RepairRecord:
    """What `re-export` did.

    Attributes:
        source: the path of the model.
        out: the output folder; null if nothing was written.
        changes: every change of a graph.
        before: verdict and findings before the repair.
        after: verdict and findings on the copy; null if there is none.
        proof: the claims about the copy.
        advice: what a loop must do that cannot use the copy.
        repairs: the repairs that changed something.
        not_repaired: the findings that were not repaired.
        files: the files that differ from the source.
        undo: how to undo the repair.
        proved: whether there is a proof, and all of it holds.
        export: how the model was exported again; null if it was not.
        contents: the files of OUT that kvdoctor wrote, relative to it; it never replaces others.
        loop: what a loop of the copy must do that one of the original need not do.
        cache_costs: what a narrower type of the cache costs, where one was asked for.
        bases: what conversions were compared with where that is not the model at `source`, and why.
    """

    source: str
    out: str | None
    changes: tuple[Change, ...]
    before: RepairSide
    after: RepairSide | None
    proof: tuple[Proof, ...]
    advice: tuple[str, ...] = ()
    repairs: tuple[AppliedRepair, ...] = ()
    not_repaired: tuple[NotRepaired, ...] = ()
    files: tuple[ChangedFile, ...] = ()
    undo: tuple[str, ...] = ()
    proved: bool = False
    export: ExportRecord | None = None
    contents: tuple[str, ...] = ()
    loop: tuple[str, ...] = ()
    cache_costs: tuple[CacheCosts, ...] = ()
    bases: tuple[str, ...] = ()

    @property
    def is_planned(self) -> bool:
        """Whether a repaired copy was diagnosed and not written, as in a dry run: the original is all there is."""
        return self.out is None and self.after is not None and self.export is None
