"""One stack on the page: its cache over time, its contract, its differences, its times and its steps."""

from collections.abc import Iterator, Sequence

from kvdoctor.analysis.memory import MemoryPlan
from kvdoctor.decode.experiments import by_name, load
from kvdoctor.decode.runs import Run
from kvdoctor.decode.tolerances import Tolerance, find_tolerance
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.page import cache_chart, charts, contract_diagram
from kvdoctor.report.page.blocks import (
    APPENDIX,
    PagePosition,
    appendix,
    chip,
    code,
    fold,
    label_list,
    more_line,
    scrollable,
    section,
    table,
)
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import shortened
from kvdoctor.report.wording.contract import describe_contract, list_slots
from kvdoctor.report.wording.devices import DEVICES_TITLE, describe_devices
from kvdoctor.report.wording.memory import (
    describe_plan,
    format_plan_title,
    is_plan_requested,
    list_assumptions,
    tabulate_alternatives,
    tabulate_paging,
)
from kvdoctor.report.wording.runs import (
    describe_fault_location,
    describe_parity,
    describe_result,
    format_outcome,
    tabulate_differences,
    tabulate_steps,
)
from kvdoctor.report.wording.targets import list_target_releases, select_local_runs, tabulate_targets
from kvdoctor.report.wording.units import format_count

MOST_SLOTS, MOST_STEPS = 256, 40
Row = Sequence[Content]


def stack_section(stack: StackFacts, report: Report, place: PagePosition, name: str) -> Element:
    """The section of a stack, with the id `name`."""
    runs = select_local_runs(report, stack.name)
    done = [run for run in runs if run.outcome != "skipped"]
    below = place.below(name)
    parts: list[Content] = [
        h("p", f"{stack.layout}: ", [[code(file), " "] for file in stack.files[:12]], class_="lead")
    ]
    contract = stack.contract
    if contract is not None:
        if pictures := cache_chart.draw_loops(done, contract, below.below()):
            legend = cache_chart.legend()
            parts.append(section(below, "cache", "The cache over time", legend, h("div", pictures, class_="loops")))
        parts.append(section(below, "contract", "The cache contract", *_contract(stack, below)))
        if done:
            limit = find_tolerance(contract.exactness, report.arguments.get("tolerances", {}))
            parts.append(
                section(
                    below,
                    "differences",
                    "Differences of the logits from the run without a cache",
                    *_differences(done, stack, limit, below),
                )
            )
        if (times := charts.draw_times(report, stack.name, below)) is not None:
            parts.append(section(below, "times", "Time per step, measured on this machine", times, class_=APPENDIX))
    else:
        parts.append(h("p", "No cache contract could be read."))
    if stack.cache is not None and stack.cache.parts and is_plan_requested(report.arguments):
        parts.append(section(below, "memory", "Memory", *_memory(stack.cache, below)))
    parts.append(section(below, "experiments", "Experiments", *_experiments(runs, below), class_=APPENDIX))
    if contract is not None and any(run.steps for run in done):
        parts.append(section(below, "steps", "Steps", *_steps(done, stack, below), class_=APPENDIX))
    if targets := list(_targets(report, stack.name, below)):
        parts.append(section(below, "targets", "Target runtimes", *targets))
    return section(place, name, ("Stack ", h("span", stack.name, class_="name")), parts, class_="stack")


def _contract(stack: StackFacts, place: PagePosition) -> Iterator[Content]:
    contract = stack.contract
    assert contract is not None  # noqa: S101 - asked of a stack with one
    title = place.id("contract-title")
    if contract.slots and {"prefill", "decode"} <= contract.phases.keys():
        yield scrollable(title, contract_diagram.draw_contract(contract, place.id("diagram")))
        yield appendix(label_list((label, shortened(text, 900)) for label, text in describe_contract(stack)))
    if stack.devices:
        listed = label_list((label, shortened(text, 900)) for label, text in describe_devices(stack))
        yield appendix(fold(f"{DEVICES_TITLE[0].upper()}{DEVICES_TITLE[1:]}", listed))
    rows = [[code(cell) for cell in row] for row in list(list_slots(contract))[:MOST_SLOTS]]
    header = ("past input", "type", "growth", "carry to the next step", "present output")
    made = table(place.id("slots"), f"The slots of {stack.name}", header, rows)
    left_out = more_line(len(contract.slots) - MOST_SLOTS, "slot")
    yield appendix(fold(f"All {format_count(len(contract.slots), 'slot')} of the graph", made), left_out)


def _differences(done: Sequence[Run], stack: StackFacts, limit: Tolerance, place: PagePosition) -> Iterator[Content]:
    assert stack.contract is not None  # noqa: S101
    others = {experiment.name for experiment in load() if not experiment.judged}
    done = [run for run in done if run.experiment not in others]
    yield charts.draw_differences(done, stack.contract, limit, place)
    yield appendix(charts.draw_layers(done, stack.contract, place.below()))


def _experiments(runs: Sequence[Run], place: PagePosition) -> Iterator[Content]:
    """Every run with its question, outcome and result; those that were skipped with the reason."""
    if not runs:
        yield h("p", "No decode step was run.")
        return
    known = by_name()
    deciding, others, skipped = list[Row](), list[Row](), list[Row]()
    for run in runs:
        experiment = known.get(run.experiment)
        question, why = (experiment.question, experiment.why) if experiment else ("", "")
        if run.outcome == "skipped":
            skipped.append((run.experiment, question, shortened(run.reason or "", 400)))
        else:
            counts = experiment is None or experiment.judged
            row = (run.experiment, _outcome(run), question, shortened(describe_result(run, why), 600))
            (deciding if counts else others).append(row)
    header: Row = ("experiment", "outcome", "question", "result, differences in SD of the logits")
    if deciding:
        yield table(place.id("judged"), "Experiments that decide the verdict", header, deciding, "runs")
    if others:
        caption = "Common workarounds, and experiments that look for causes: a failure here is no fault of the model"
        yield table(place.id("tried"), caption, header, others, "runs")
    if skipped:
        header = ("experiment", "question", "reason")
        made = table(place.id("skipped"), "Experiments that were skipped", header, skipped, "runs")
        yield fold(f"{format_count(len(skipped), 'experiment')} skipped, with reasons", made)


def _steps(done: Sequence[Run], stack: StackFacts, place: PagePosition) -> Iterator[Content]:
    """The steps of each run; the first loop that did not pass is open, else the first."""
    runs = [run for run in done if run.steps]
    first = next((run for run in runs if run.experiment in cache_chart.CHARTED and run.shows != "passed"), runs[0])
    for number, run in enumerate(runs):
        content: list[Content] = []
        assert stack.contract is not None  # noqa: S101
        header, rows = tabulate_steps(run, stack.contract)
        content.append(_bounded(place.id(f"run-{number}"), f"Steps of {run.experiment}", header, rows))
        if (found := tabulate_differences(run)) is not None and run.experiment in cache_chart.CHARTED:
            caption = f"{run.experiment} compared with {run.yardstick}"
            content.append(_bounded(place.id(f"parity-{number}"), caption, *found))
            content.append(label_list(describe_parity(run)))
        if run.error:
            content.append(label_list([("runtime", code(run.error, 1200))]))
        if rows := list(map(list, describe_fault_location(run))):
            content.append(label_list((label, shortened(text, 900)) for label, text in rows))
        summary = (
            h("strong", run.experiment),
            " ",
            _outcome(run),
            f" {format_count(len(run.steps), 'step')}",
        )
        yield fold(summary, content, open_=run is first)


def _outcome(run: Run) -> Element:
    """The outcome of a run; one that does not decide the verdict never has the color of a fault."""
    experiment = by_name().get(run.experiment)
    return chip(format_outcome(run), run.shows if experiment is None or experiment.judged else "plain")


def _bounded(name: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Content:
    if len(rows) <= MOST_STEPS:
        return table(name, caption, header, rows)
    half = MOST_STEPS // 2
    gap = ["\u2026", *[""] * (len(header) - 1)]
    kept = [*rows[:half], gap, *rows[-half:]]
    return table(name, caption, header, kept), more_line(len(rows) - MOST_STEPS, "step")


def _memory(plan: MemoryPlan, place: PagePosition) -> Iterator[Content]:
    title = format_plan_title(plan)
    yield h("p", title[0].upper() + title[1:] + ".")
    yield label_list(describe_plan(plan))
    for number, (caption, found) in enumerate(
        (
            ("The same cache, stored in other ways", tabulate_alternatives(plan)),
            ("The cache in blocks (paged)", tabulate_paging(plan)),
        )
    ):
        if found is not None:
            yield table(place.id(f"plan-{number}"), caption, *found)
    yield label_list(list_assumptions(plan))


def _targets(report: Report, stack: str, place: PagePosition) -> Iterator[Content]:
    for number, (header, rows) in enumerate(tabulate_targets(report, stack)):
        yield table(
            place.id(f"matrix-{number}"),
            f"{stack} on each target runtime; FAILS 2 means: fails at step 2",
            header,
            rows,
        )
        for line in list_target_releases(report):
            yield h("p", line, class_="hint")
