"""One stack on the page: its cache over time, its contract, its differences, its times and its steps."""

from collections.abc import Iterator, Sequence

from kvdoctor.experiments import load
from kvdoctor.memory import MemoryPlan
from kvdoctor.report import contract_words, matrix, parity_text, plan_text, wording
from kvdoctor.report.document import Report, StackFacts
from kvdoctor.report.page import cache_chart, contract_diagram, heat_map, timing
from kvdoctor.report.page.blocks import (
    Place,
    chip,
    code,
    counted,
    facts,
    folded,
    more_line,
    scrolled,
    section,
    table,
)
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import shortened
from kvdoctor.tolerances import Tolerance, tolerance_under
from kvdoctor.trace import Run

MOST_SLOTS, MOST_STEPS = 256, 40
Row = Sequence[Content]


def shown(stack: StackFacts, report: Report, place: Place, name: str) -> Element:
    """The section of a stack, with the id `name`."""
    runs = matrix.runs_here(report, stack.name)
    done = [run for run in runs if run.outcome != "skipped"]
    below = place.below(name)
    parts: list[Content] = [
        h("p", f"{stack.layout}: ", [[code(file), " "] for file in stack.files[:12]], class_="lead")
    ]
    contract = stack.contract
    if contract is not None:
        if pictures := cache_chart.figures(done, contract, below.below()):
            legend = cache_chart.legend()
            parts.append(section(below, "cache", "The cache over time", legend, h("div", pictures, class_="loops")))
        parts.append(section(below, "contract", "The cache contract", *_contract(stack, below)))
        if done:
            limit = tolerance_under(report.arguments.get("tolerances", {}), contract.exactness)
            parts.append(
                section(
                    below,
                    "differences",
                    "Differences of the logits",
                    *_differences(done, stack, limit, below),
                )
            )
        if (times := timing.chart(report, stack.name, below)) is not None:
            parts.append(section(below, "times", "Time per step, measured here", times))
    else:
        parts.append(h("p", "No cache contract could be read."))
    if stack.cache is not None and stack.cache.parts and plan_text.is_asked(report.arguments):
        parts.append(section(below, "memory", "Memory", *_memory(stack.cache, below)))
    parts.append(section(below, "experiments", "Experiments", *_experiments(runs, below)))
    if contract is not None and any(run.steps for run in done):
        parts.append(section(below, "steps", "Steps", *_steps(done, stack, below)))
    if targets := list(_targets(report, stack.name, below)):
        parts.append(section(below, "targets", "Under each target", *targets))
    return section(place, name, ("Stack ", h("span", stack.name, class_="name")), parts, class_="stack")


def _contract(stack: StackFacts, place: Place) -> Iterator[Content]:
    contract = stack.contract
    assert contract is not None  # noqa: S101 - asked of a stack with one
    title = place.id("contract-title")
    if contract.slots and {"prefill", "decode"} <= contract.phases.keys():
        yield scrolled(title, contract_diagram.diagram(contract, place.id("diagram")))
        yield facts((label, shortened(text, 900)) for label, text in wording.contract_rows(stack))
    rows = [[code(cell) for cell in row] for row in list(contract_words.slot_rows(contract))[:MOST_SLOTS]]
    header = ("past", "type", "growth", "carry", "present")
    made = table(place.id("slots"), f"The slots of {stack.name}", header, rows)
    yield folded(f"All {counted(len(contract.slots), 'slot')}, as the graph has them", made)
    yield more_line(len(contract.slots) - MOST_SLOTS, "slot")


def _differences(done: Sequence[Run], stack: StackFacts, limit: Tolerance, place: Place) -> Iterator[Content]:
    assert stack.contract is not None  # noqa: S101
    others = {experiment.name for experiment in load() if not experiment.judged}
    done = [run for run in done if run.experiment not in others]
    yield heat_map.steps(done, stack.contract, limit, place)
    yield heat_map.layers(done, stack.contract, place.below())


def _experiments(runs: Sequence[Run], place: Place) -> Iterator[Content]:
    """Every run: what was asked, the outcome, and what stands behind it; those that were not run with the reason."""
    if not runs:
        yield h("p", "No decode step was run.")
        return
    known = {experiment.name: experiment for experiment in load()}
    judged, tried, skipped = list[Row](), list[Row](), list[Row]()
    for run in runs:
        experiment = known.get(run.experiment)
        asked, why = (experiment.question, experiment.why) if experiment else ("", "")
        if run.outcome == "skipped":
            skipped.append((run.experiment, asked, shortened(run.reason or "", 400)))
        else:
            counts = experiment is None or experiment.judged
            row = (run.experiment, _outcome(run), asked, shortened(wording.detail(run, why), 600))
            (judged if counts else tried).append(row)
    header: Row = ("experiment", "outcome", "question", "what it showed")
    if judged:
        yield table(place.id("judged"), "What the verdict rests on", header, judged, "runs")
    if tried:
        caption = "What teams try, and what looks for causes: to fail here is no fault of the model"
        yield table(place.id("tried"), caption, header, tried, "runs")
    if skipped:
        header = ("experiment", "question", "reason")
        made = table(place.id("skipped"), "Experiments that were skipped", header, skipped, "runs")
        yield folded(f"{counted(len(skipped), 'experiment')} skipped, with the reasons", made)


def _steps(done: Sequence[Run], stack: StackFacts, place: Place) -> Iterator[Content]:
    """The steps of each run; the first loop that did not pass is open, else the first."""
    told = [run for run in done if run.steps]
    first = next((run for run in told if run.experiment in cache_chart.LOOPS and run.shows != "passed"), told[0])
    for number, run in enumerate(told):
        content: list[Content] = []
        assert stack.contract is not None  # noqa: S101
        header, rows = wording.steps_table(run, stack.contract)
        content.append(_bounded(place.id(f"run-{number}"), f"Steps of {run.experiment}", header, rows))
        if (found := parity_text.differences_table(run)) is not None and run.experiment in cache_chart.LOOPS:
            caption = f"{run.experiment} against {run.yardstick}"
            content.append(_bounded(place.id(f"parity-{number}"), caption, *found))
            content.append(facts(parity_text.facts(run)))
        if run.error:
            content.append(facts([("runtime", code(run.error, 1200))]))
        if rows := list(map(list, wording.place_rows(run))):
            content.append(facts((label, shortened(text, 900)) for label, text in rows))
        summary = (
            h("strong", run.experiment),
            " ",
            _outcome(run),
            f" {counted(len(run.steps), 'step')}",
        )
        yield folded(summary, content, open_=run is first)


def _outcome(run: Run) -> Element:
    """What became of a run; what no verdict rests on does not wear the colour of a fault."""
    experiment = next((one for one in load() if one.name == run.experiment), None)
    return chip(wording.outcome(run), run.shows if experiment is None or experiment.judged else "plain")


def _bounded(name: str, caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Content:
    if len(rows) <= MOST_STEPS:
        return table(name, caption, header, rows)
    half = MOST_STEPS // 2
    gap = ["\u2026", *[""] * (len(header) - 1)]
    kept = [*rows[:half], gap, *rows[-half:]]
    return table(name, caption, header, kept), more_line(len(rows) - MOST_STEPS, "step")


def _memory(plan: MemoryPlan, place: Place) -> Iterator[Content]:
    title = plan_text.title(plan)
    yield h("p", title[0].upper() + title[1:] + ".")
    yield facts(plan_text.rows(plan))
    for number, (caption, found) in enumerate(
        (("The same cache, kept otherwise", plan_text.alternatives(plan)), ("In blocks", plan_text.paged(plan)))
    ):
        if found is not None:
            yield table(place.id(f"plan-{number}"), caption, *found)
    yield facts(plan_text.assumptions(plan))


def _targets(report: Report, stack: str, place: Place) -> Iterator[Content]:
    for number, (header, rows) in enumerate(matrix.matrices(report, stack)):
        yield table(place.id(f"matrix-{number}"), f"{stack} under each target", header, rows)
        for line in matrix.legend(report):
            yield h("p", line, class_="hint")
