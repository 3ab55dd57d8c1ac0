"""What works: the uses of a stack that passed, how closely and by what controls, what was not tried, what decides."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdoctor.choices import CPU
from kvdoctor.decode.runs import LOOPS, WRONG, Run
from kvdoctor.errors import as_argument
from kvdoctor.findings import means_incomplete
from kvdoctor.report.blocks import Span, Text
from kvdoctor.report.document import TOTAL_SECONDS, Report, exit_code
from kvdoctor.report.escaping import shortened
from kvdoctor.report.facts import Ground, StackFacts
from kvdoctor.report.wording import format_count, join_some
from kvdoctor.report.wording.contract import describe_proof
from kvdoctor.report.wording.finding import group_open_checks
from kvdoctor.report.wording.runs import describe_comparisons, select_local_runs
from kvdoctor.report.wording.summary import format_counts, format_seconds, name_verdict

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment

GOLDEN, TARGETS, REFERENCE = "KV321", "KV404", "KV320"
"""The codes of what compares with golden numbers, a target runtime, and a checkpoint."""

MOST_NAMES, MOST_REASONS, MOST_SIZES = 6, 3, 4

LOOP, MANY, BATCH = "one token a step", "several at once", "batch"
BETWEEN = " \u00b7 "
LENGTHS = "reach {} tokens"
USES = {
    "plain-loop": (LOOP, "feed every present back"),
    **dict.fromkeys(("frozen-past", "paged-loop", "empty-past"), (LOOP, "feed one token a step")),
    "held-loop": (LOOP, "keep the cross-attention cache of the prefill"),
    "chunk": (MANY, "feed several tokens on a cache"),
    **dict.fromkeys(("batch", "batch-rows"), (BATCH, "feed several sequences at once")),
    **dict.fromkeys(("long-chunks", "chunks-near-thresholds"), (MANY, f"feed several tokens at once and {LENGTHS}")),
    "rows-near-thresholds": (BATCH, LENGTHS),
    "one-token-prompt": ("a prompt of one token", "begin with a prompt of one token"),
    "rows-apart": ("ragged batch", "feed rows of different lengths"),
    "beam-reorder": ("beams", "decode beams (nine rows that are reordered)"),
    "left-padding": ("left padding", "pad a batch on the left"),
    "right-padding": ("right padding", "pad a prompt on the right"),
    "encoder-padding": ("padded encoder rows", "pad the encoder rows of a batch"),
    "other-encoder-length": ("another encoder length", "change the encoder length"),
    **dict.fromkeys(("encoder-rows", "rows-in-prompt"), ("images or audio", "feed images or audio with the prompt")),
    "rewind": ("rollback", "take tokens back"),
    "second-turn": ("second chat turn", "begin a second turn (several tokens after single ones)"),
    "speculation": ("drafts", "check several drafts in a call"),
    "unread-content": ("reused buffers", "reuse a buffer with old content"),
    "history": ("other earlier tokens", "change earlier tokens"),
    "own-session": ("two sequences in turn", "run two sequences in turn"),
    "adapter": ("an adapter (LoRA)", "feed an adapter (LoRA)"),
    "full-context": ("the full context", "fill the context"),
    "prefix-sharing": ("a shared prefix", "share a prefix"),
    **dict.fromkeys(("one-buffer", "one-buffer-batch"), ("one buffer for past and present", "bind them to one buffer")),
    **dict.fromkeys(("way-basic", "way-off"), ("other optimization levels", "change the graph optimization")),
    "way-io-binding": ("bound inputs and outputs", "bind inputs and outputs"),
    "operator-search": ("its own search", "let the operator search"),
}
"""Experiments in plain English: what works, and what somebody does with whom it does not. Others try more lengths."""
FAILS = {"failed": "the runtime stops with an error", "differs": "wrong logits", "died": "the process ends"}


def list_uses(report: Report, stack: StackFacts) -> list[Run]:
    """The runs that were done of the uses which a verdict rests on: loops, other sizes, padding and so on."""
    runs = select_local_runs(report, stack.name)
    experiments = load_experiments(runs)
    errors = {one.experiment for one in report.findings if (one.stack, one.severity) == (stack.name, "error")}
    named = {run.experiment for run in runs if run.experiment in errors and run.shows in WRONG}
    uses = named | {name for name in (run.experiment for run in runs) if _is_use(experiments.get(name))}
    return [run for run in runs if run.outcome != "skipped" and run.experiment in uses]


def list_tally(report: Report) -> list[str]:
    """The parts of the last line: verdict and counts, uses that work, the next command, time and exit code."""
    of_copy, record = "", report.repair
    if record is not None and (record.out is not None or (record.proof and not record.is_planned)):
        of_copy = "the copy is " if record.out is not None else "no copy was written; the original is "
    found, seconds = format_counts(report), report.measured.get(TOTAL_SECONDS)
    runs = [run for stack in report.stacks for run in list_uses(report, stack)]
    # What a float32 copy alone shows, and no finding calls an error, does not keep a use from working.
    working = sum(run.shows == "passed" or (report.verdict == "healthy" and run.hidden) for run in runs)
    whose = " of the copy" if record is not None and record.after is not None else ""
    wrong = sum(run.shows in WRONG and not run.hidden for run in runs)
    is_read = report.command == "inspect" and report.verdict == "nothing-found"
    # What the caller's loop does wrong says nothing of the model.
    in_loop = {one.name for one in report.findings if one.severity == "error"} == {"loop-breaks-contract"}
    whose = " of the model" if in_loop else whose
    # A model whose file or plain loop is wrong does not work, whatever other runs showed.
    broken = any(one.severity == "error" and one.experiment in (None, *LOOPS) for one in report.findings)
    of_uses = ", but not for every use" if name_verdict(report) == "healthy" and wrong else ""
    parts = (
        f"{of_copy}{name_verdict(report)}{of_uses}{f': {found}' if found else ''}",
        "the error is in your loop" if in_loop else None,
        f"{working} of {format_count(len(runs), 'use')}{whose} work" if runs and (in_loop or not broken) else None,
        format_seconds(seconds) if isinstance(seconds, float) else None,
        f"exit {exit_code(report, report.fail_on)}",
        f"next: kvdoctor step-test {as_argument(report.model.path)}" if is_read else None,
    )
    return [*filter(None, parts)]


def list_working(report: Report) -> list[StackFacts]:
    """The stacks that work: a loop passed, no error is about them, and nothing essential stayed open."""
    faulty = {finding.stack for finding in report.findings if finding.severity == "error"}
    broken = faulty | {entry.stack for entry in report.not_checked if entry.essential and entry.stack is not None}
    passed = {run.stack for stack in report.stacks for run in list_uses(report, stack) if _is_passed_loop(run)}
    return [one for one in report.stacks if one.name in passed and not broken & {one.name, None}]


def _is_passed_loop(run: Run) -> bool:
    return run.experiment in LOOPS and run.shows == "passed"


def describe_health(report: Report) -> tuple[list[str], list[str], list[str]]:
    """What works and what does not, a line for stacks with the same uses; of a healthy model also how closely."""
    stacks, closely = list_working(report), dict[str, list[str]]()
    works = [
        f"{join_some(names, MOST_NAMES)} {'work' if len(names) > 1 else 'works'}: {uses}"
        for uses, names in _group_names(stacks, lambda stack: _name_uses(report, stack)).items()
    ]
    if report.verdict == "healthy":
        closely = _group_names(stacks, lambda stack: _describe_loop(report, stack))
    shown = [stack for stack in stacks if stack.proof and closely]
    proved = _group_names(shown, lambda one: "; ".join(f"{label}: {text}" for label, text in describe_proof(one)))
    named = [
        f"{join_some(names, MOST_NAMES)}: {one}" if len(texts) > 1 else one
        for texts in (closely, proved)
        for one, names in texts.items()
    ]
    fails = _group_names(stacks, lambda stack: _name_failing(report, stack))
    return works, [f"{join_some(names, MOST_NAMES)}: {one}" for one, names in fails.items() if one], named


def list_not_tried(report: Report) -> list[str]:
    """A line, if any: the uses that `--require` names and the model does not allow, and the options that try more."""
    reasons: dict[str, list[str]] = {}
    stacks = list_working(report) if report.verdict == "healthy" else []
    for use, reason in {use: reason for stack in stacks for use, reason in _find_not_allowed(report, stack)}.items():
        reasons.setdefault(reason, []).append(use)
    parts = [f"{', '.join(uses)} ({reason})" for reason, uses in reasons.items()]
    more = [] if report.arguments.get("thorough") else ["longer runs (--thorough)"]
    if report.command in ("step-test", "gate") and report.arguments.get("reference") is None:
        more.append("the checkpoint (--reference)")
    others = list(dict.fromkeys(name for stack in stacks for name in _list_uncompared(stack)))
    if others:
        more.append(f"output {join_some(others, 1)} (--logits-output {as_argument(others[0])})")
    return [f"not tried: {', '.join([*parts, *more])}"] if stacks and parts + more else []


def _list_uncompared(stack: StackFacts) -> Iterator[str]:
    """The outputs with a row for each token next to the logits: `float[batch, new, hidden]`, or a second head."""
    graph = stack.contract.graph("decode") if stack.contract is not None else None
    logits = graph.port("logits") if graph is not None else None
    if graph is None or logits is None or len(logits.shape or ()) < 3:
        return
    for port in graph.outputs:
        if port.role == "auxiliary" and port.shape and port.shape[:-1] == (logits.shape or ())[:-1]:
            yield port.name


def _group_names(stacks: Sequence[StackFacts], describe: Callable[[StackFacts], str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for stack in stacks:
        found.setdefault(describe(stack), []).append(stack.name)
    return found


def _name_uses(report: Report, stack: StackFacts) -> str:
    """`one token a step (cache lengths 0 to 49), batch (2, 3)`."""
    runs = list_uses(report, stack)
    passed = [run for run in runs if run.shows == "passed"]
    if report.verdict != "healthy":  # such a report is read for what does not work
        return f"{len(passed)} of {len(runs)} uses"
    failing = _list_failing(runs)
    wrong = {name for name, doing, _ in failing if "{}" not in doing} - {LOOP}
    named = {USES[run.experiment][0] for run in passed if run.experiment in USES} - wrong
    ordered = (name for name in dict.fromkeys(name for name, _ in USES.values()) if name in named)
    ground = None if any("{}" in doing for _, doing, _ in failing) else report.ground
    return ", ".join(name + _name_sizes(ground, name) for name in ordered)


def _name_failing(report: Report, stack: StackFacts) -> str:
    """`wrong logits if you take tokens back, or reorder the rows of the cache (beams)`; empty where all works."""
    failing: dict[str, dict[str, None]] = {}
    for _, doing, run in _list_failing(list_uses(report, stack)):
        step = run.wrong_step or next(reversed(run.steps), None)
        tokens = step.past_length + step.new_tokens if step is not None else "more"
        failing.setdefault(FAILS.get(run.outcome, FAILS["differs"]), {})[doing.format(tokens)] = None
    return "; ".join(f"{what} if you {', or '.join(doing)}" for what, doing in failing.items())


def _list_failing(runs: Sequence[Run]) -> list[tuple[str, str, Run]]:
    """The use of each wrong run and what somebody does; of a use that is wrong anyway no other lengths."""
    found = [(*USES.get(run.experiment, (LOOP, LENGTHS)), run) for run in runs if run.shows in WRONG]
    anyway = {name for name, doing, _ in found if "{}" not in doing}
    return [one for one in found if "{}" not in one[1] or one[0] not in anyway]


def _name_sizes(ground: Ground | None, name: str) -> str:
    """The sizes with which a use was tried, in brackets."""
    if ground is None or name not in (LOOP, MANY, BATCH):
        return ""
    if name == LOOP:
        return f" (cache lengths {ground.pasts[0]} to {ground.pasts[1]})"
    sizes = [str(size) for size in (ground.chunks if name == MANY else ground.batch) if size > 1]
    sizes[3:-1] = ["..."] if len(sizes) > MOST_SIZES else sizes[3:-1]
    return f" ({', '.join(sizes)})" if sizes else ""


def _find_not_allowed(report: Report, stack: StackFacts) -> Iterator[tuple[str, str]]:
    """The uses that `--require` names, that are tried as the options are, and that no run could try, with the reason.

    The full context belongs to the longer runs: by itself it is named where these were asked for.
    """
    from kvdoctor.decode.experiments import load, uses

    thorough = report.arguments.get("thorough")
    by_use: dict[str, list[Run]] = {}
    for run in select_local_runs(report, stack.name):
        required = uses()[run.experiment].required if run.experiment in uses() else None
        if required is not None:
            by_use.setdefault(required, []).append(run)
    tried = {one.use.required for one in load() if one.use is not None and (thorough or not one.thorough)}
    needed = {use.required for use in uses().values() if use.needed}
    for use, runs in by_use.items():
        if use in tried - needed and all(run.outcome == "skipped" for run in runs):
            yield use, shortened(runs[0].reason or "not run")


def _describe_loop(report: Report, stack: StackFacts) -> str:
    """`agrees with a run without a cache (largest difference 1.6e-06 of the ...; control: ...)`."""
    loop = next(filter(_is_passed_loop, list_uses(report, stack)))
    worst = max((step.difference.relative for step in loop.steps if step.difference is not None), default=0.0)
    float32 = f", {loop.unrounded.worst:.1e} in a float32 copy" if loop.unrounded is not None else ""
    close = f"largest difference {worst:.1e} of the logits' standard deviation{float32}" if worst else "no difference"
    visible = [control.difference.relative for control in loop.controls if control.visible and control.difference]
    control = f"; control: a corrupted cache gives {min(visible):.2g}" if visible else ""
    verb = "differs by rounding alone from" if loop.by_rounding else "agrees with"
    if not loop.repeats:
        return f"{verb} a run without a cache ({close}{control})"
    others = describe_comparisons(select_local_runs(report, stack.name))
    same = f"the same logits{' but for rounding' * loop.by_rounding} {others} ({close}{control})"
    return f"no call without a cache exists to compare with: {same}"


def explain_undecided(report: Report, rest: str) -> list[tuple[str, Text]]:
    """Label and text: why there is no verdict, and what decides. Of many reasons `rest` names where the others are."""
    groups = [group for group in group_open_checks(report.not_checked) if group.essential]
    # What follows the reason of a folder without a model is the advice.
    found = (group.describe(600) for group in groups[:MOST_REASONS])
    why = (text if report.model.files else text.partition("; ")[0] for text in found)
    rows: list[tuple[str, Text]] = [("why", text) for text in why]
    if report.verdict == "not-applicable" and rows:
        return [("why", groups[0].reason.removeprefix("not run: "))]
    if len(groups) > MOST_REASONS:
        rows.append(("", f"{format_count(len(groups) - MOST_REASONS, 'more reason')} ({rest})"))
    return [*rows, ("decide", advise_decision(report))]


def advise_decision(report: Report) -> Text:
    """What decides about a model that is neither healthy nor unhealthy: a command, or why there is none."""
    model = as_argument(report.model.path)
    again = f"kvdoctor step-test {model}"
    blocking = next((f for f in report.findings if means_incomplete(f.code)), None)
    if blocking is not None:
        return _advise(blocking.repair.command) if blocking.repair.command else f"fix {blocking.code} first"
    if any(f.name == "loop-breaks-contract" and f.confidence == "suspected" for f in report.findings):
        return "the trace does not show whether that is meant: your loop does; values decide more (docs/trace.md)"
    if report.command == "speed":
        if report.arguments.get("against") is None:
            return _advise(again, "shows whether it can be run at all")
        remark = "a new report to compare with: of this model, on this machine, while nothing else runs"
        return _advise(f"kvdoctor speed {model} --output speed.json", remark)
    if any(one.code == "KV420" and one.essential for one in report.not_checked):
        return "record the trace again, until the program ends and with the model of `kvdoctor loop` (docs/trace.md)"
    advice = _advise_missing(report, again) or _advise_by_runs(report, model) or _advise_feeds(report, again)
    if advice is not None:
        return advice
    if any(stack.contract is None or stack.contract.missing for stack in report.stacks):
        return _advise(f"{again} --contract FILE", "`kvdoctor contract` prints what was read; complete it")
    absent = [entry.reason for entry in report.not_checked if entry.reason.startswith("no .onnx file")]
    if not report.model.files and absent:
        command = re.search(r"(?:export it: |`)(kvdoctor [^`]+)", absent[0])
        return _advise(command[1]) if command else "give the folder of an export, or an .onnx file"
    if not report.stacks or report.command == "inspect":
        return _advise(f"kvdoctor inspect {model} -v", "shows what was read")
    return "no command: kvdoctor cannot run this model step by step; compare it with its source in its own runtime"


def _advise(command: str, remark: str = "") -> Text:
    """A command to copy, and what it is good for."""
    return (Span(command, "command"), f"   ({remark})") if remark else Span(command, "command")


def _advise_missing(report: Report, again: str) -> Text | None:
    """What decides where a target or a checkpoint named by an option is missing; None where something else is."""
    missing = {entry.code for entry in report.not_checked if entry.essential}
    if "*" in missing and report.arguments.get("from") is not None:
        return "do what the reason names, then the same command again"
    reference = report.arguments.get("reference")
    elsewhere = {name: report.arguments.get(name, ()) for name in ("target", "provider")}
    named = {name: value if isinstance(value, str) else ",".join(value) for name, value in elsewhere.items()}
    options = [f" --{name} {as_argument(value)}" for name, value in named.items() if value not in ("", CPU)]
    if options and missing and missing <= {TARGETS}:
        command, repairs = again + "".join(options), "do what the reason names, then the same again"
    elif reference and missing == {REFERENCE}:
        command = f"{again} --reference {as_argument(reference)}"
        repairs = "fix the checkpoint by the reason above, then the same again"
    else:
        return None
    once = "once without --offline; what is downloaded then is cached"
    return _advise(command, once if report.arguments.get("offline") else repairs)


def _advise_feeds(report: Report, again: str) -> Text | None:
    """The option that says what an input takes of which the file says nothing; None where there is no such input."""
    ambiguities = (one for stack in report.stacks if stack.contract for one in stack.contract.ambiguities)
    open_ports = {one.subject: one.readings[0].port for one in ambiguities if one.unknown and not one.settled}
    if not open_ports:
        return None
    if any(port.role != "setting" for port in open_ports.values()):
        names = ", ".join(map(repr, open_ports))
        return _advise(f"{again} --contract FILE", f"`kvdoctor contract` prints one; write the role of {names} into it")
    feeds = " ".join(f"--feed {as_argument(name)}=VALUE" for name in open_ports)
    return _advise(f"{again} {feeds}", "the constant that your loop feeds there")


def _advise_by_runs(report: Report, model: str) -> Text | None:
    """What decides by what the runs show; None where the loop was not run. `model` is the argument of a command."""
    again = f"kvdoctor step-test {model}"
    loops = [run for run in report.runs if run.experiment in LOOPS]
    if any(run.without_tokens for run in report.runs):
        return _advise(f"kvdoctor inspect {model} --weights", "shows weights that are zero or all equal")
    if any(run.outcome == "died" for run in loops):
        return f"{again} --timeout SECONDS --max-memory MIB, with larger limits"
    if any(run.outcome not in ("skipped", "failed") for run in loops):
        if report.command != "record" and all(entry.code == GOLDEN for entry in report.not_checked if entry.essential):
            remark = "golden numbers of this model; those that were given compare nothing"
            return _advise(f"kvdoctor record {model} -o FILE", remark)
        return _advise(f"{again} --reference CHECKPOINT", "compares every step with PyTorch")
    return None


def load_experiments(runs: Sequence[Run]) -> "Mapping[str, Experiment]":
    """The experiments by name; nothing is loaded where nothing was run, since that loads numpy."""
    if not runs:
        return {}
    from kvdoctor.decode.experiments import by_name

    return by_name()


def _is_use(experiment: "Experiment | None") -> bool:
    """Whether a verdict rests on the experiment by itself: it explains no other, and is no known wrong workaround."""
    if experiment is None or not (experiment.judged and experiment.shown):
        return False
    extra = experiment.thorough and experiment.use is None
    return not (experiment.explains or experiment.on_request or extra)
