"""The evidence of a report as text, for `--verbose`: findings in full, tables of runs and steps, contracts, ports."""

from typing import TYPE_CHECKING

from kvdoctor.decode.runs import Run
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.repair_record import RepairRecord
from kvdoctor.report.safe import shortened
from kvdoctor.report.text_page import STYLES, Page
from kvdoctor.report.wording.alike import group_findings, group_open_checks, list_group_details
from kvdoctor.report.wording.cache_costs import tabulate_cache_costs
from kvdoctor.report.wording.contract import describe_contract, describe_logits, list_file_facts, list_ports
from kvdoctor.report.wording.devices import DEVICES_TITLE, describe_devices
from kvdoctor.report.wording.drafts import describe_drafts
from kvdoctor.report.wording.finding import format_headline
from kvdoctor.report.wording.memory import (
    describe_plan,
    format_plan_title,
    list_assumptions,
    tabulate_alternatives,
    tabulate_paging,
)
from kvdoctor.report.wording.parts import tabulate_parts
from kvdoctor.report.wording.repair import (
    describe_export,
    format_copy,
    format_export_title,
    format_not_repaired,
    list_costs,
    list_repair_names,
)
from kvdoctor.report.wording.runs import (
    UNIT,
    describe_fault_location,
    describe_parity,
    describe_result,
    format_cache_speedup,
    format_outcome,
    tabulate_differences,
    tabulate_steps,
)
from kvdoctor.report.wording.speed import list_speed_remarks, tabulate_speed
from kvdoctor.report.wording.summary import name_open
from kvdoctor.report.wording.targets import (
    list_target_limits,
    list_target_releases,
    select_local_runs,
    tabulate_targets,
)
from kvdoctor.report.wording.units import format_count
from kvdoctor.report.wording.variants import tabulate_variants

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Experiment


def show_details(page: Page, report: Report, show_diff: bool = False) -> None:
    """Print all that was found about the stacks, the files and the repair, and the notes."""
    if report.command == "inspect" or report.arguments.get("static"):
        page.line("")
        page.table(
            ["file", "role", "size", "IR", "opsets", "producer"],
            [list_file_facts(file) for file in report.model.files],
        )
    for line in list_target_limits(report):
        page.line(f"  {line}", "dim")
    for stack in report.stacks:
        page.line("")
        _show_stack(page, stack, report)
    show_variants(page, report)
    show_speed(page, report)
    for line in describe_drafts(report):
        page.line(line)
    if report.command == "inspect":
        _show_ports(page, report)
    if report.repair is not None:
        show_repair(page, report, report.repair, show_diff)
    page.line("")
    for note in report.notes:
        page.line(f"note: {note}", "dim")


def show_findings(page: Page, report: Report) -> None:
    """Print every finding with its evidence, alike ones of several stacks once, and what was not checked."""
    for group in group_findings(report.findings):
        page.line("")
        finding = group.first
        style = "dim" if finding.known is not None else STYLES[finding.severity]
        page.line(shortened(format_headline(finding, group.places), 600), style)
        page.pairs((label, shortened(text, 900)) for label, text in list_group_details(group))
    for checks in group_open_checks(report.not_checked):
        count = f" ({len(checks.entries)} alike)" if len(checks.entries) > 1 else ""
        page.line(
            f"{name_open(report, checks.essential)}: {checks.title}{count}: {shortened(checks.reason, 600)}", "yellow"
        )


def _show_stack(page: Page, stack: StackFacts, report: Report) -> None:
    """The contract of a stack after an inspection, else its runs."""
    runs = select_local_runs(report, stack.name)
    if report.command == "inspect":
        page.line(f"{stack.name}: the cache contract", "bold")
        page.pairs((*describe_contract(stack), *describe_logits(stack)))
        show_plan(page, stack)
        if stack.devices:
            page.line("")
            page.line(f"{stack.name}: {DEVICES_TITLE}", "bold")
            page.pairs(describe_devices(stack))
    elif runs:
        _show_runs(page, stack, runs, report)
        show_targets(page, report, stack)
    else:
        page.line(f"{stack.name} ({stack.layout}): no decode step was run", "bold")


def show_plan(page: Page, stack: StackFacts) -> None:
    """Print the memory plan of a stack, if it has a cache to plan."""
    plan = stack.cache
    if plan is None or not plan.parts:
        return
    page.line("")
    page.line(f"{stack.name}: {format_plan_title(plan)}", "bold")
    page.pairs(describe_plan(plan))
    for table in (tabulate_alternatives(plan), tabulate_paging(plan)):
        if table is not None:
            page.line("")
            page.table(*table)
    if assumptions := list(list_assumptions(plan)):
        page.line("")
        page.pairs(assumptions)


def _show_ports(page: Page, report: Report) -> None:
    """Inputs and outputs of every file that decodes or encodes."""
    used = {name for stack in report.stacks for name in stack.files}
    for file in report.model.files:
        if file.path in used or not report.stacks:
            page.line("")
            page.line(f"{file.path}: inputs and outputs", "bold")
            page.table(["", "name", "type"], list(list_ports(file, everything=True)))


def _show_runs(page: Page, stack: StackFacts, runs: list[Run], report: Report) -> None:
    """All runs of a stack, the workarounds apart from them, and the steps of each run."""
    from kvdoctor.decode.experiments import by_name  # loads numpy, which an inspection does not need

    experiments = by_name()
    tried = [run for run in runs if _is_workaround(experiments.get(run.experiment))]
    page.line(f"{stack.name} ({stack.layout}); {UNIT}", "bold")
    rows = [_describe_run(run, experiments.get(run.experiment)) for run in runs if run not in tried]
    page.table(["experiment", "outcome", ""], rows, styled=1)
    if speedup := format_cache_speedup(report.measured.get(stack.name, {}).get("step_seconds", {})):
        page.line(f"  {speedup}", "dim")
    if tried:
        page.line("")
        page.line(f"{stack.name}: workarounds that are often tried; no verdict rests on them", "bold")
        rows = [_describe_run(run, experiments.get(run.experiment)) for run in tried]
        page.table(["workaround", "outcome", ""], rows)
    for run in runs:
        if run.outcome != "skipped":
            _show_steps(page, run, stack)


def _is_workaround(experiment: "Experiment | None") -> bool:
    return experiment is not None and bool(experiment.why) and not (experiment.judged or experiment.on_request)


def _describe_run(run: Run, experiment: "Experiment | None") -> list[str]:
    why = experiment.why if experiment and not experiment.judged else ""
    question = experiment.question if experiment else ""
    return [run.experiment, format_outcome(run), ": ".join(filter(None, (question, describe_result(run, why))))]


def show_targets(page: Page, report: Report, stack: StackFacts) -> None:
    """Print the outcomes of a stack on each target runtime."""
    for header, rows in tabulate_targets(report, stack.name):
        page.line(f"  {stack.name} on each target runtime; FAILS 2 means: fails at step 2", "bold")
        page.table(header, rows)
    for line in list_target_releases(report):
        page.line(f"  {line}", "dim")


def show_variants(page: Page, report: Report) -> None:
    """Print how far the variants of a model are from the most exact one."""
    for title, header, rows in tabulate_variants(report):
        page.line("")
        page.line(title, "bold")
        page.table(header, rows)


def show_speed(page: Page, report: Report) -> None:
    """Print how fast each stack decodes."""
    for title, header, rows in tabulate_speed(report):
        page.line("")
        page.line(title, "bold")
        page.table(header, rows)
    for line in list_speed_remarks(report):
        page.line(f"  {line}", "dim")


def _show_steps(page: Page, run: Run, stack: StackFacts) -> None:
    """The steps of a run, and the error of the runtime that ended it."""
    if not run.steps or stack.contract is None:
        return
    page.line(f"  {run.experiment}, step by step", "bold")
    page.table(*tabulate_steps(run, stack.contract))
    if (differences := tabulate_differences(run)) is not None:
        page.line(f"  {run.experiment}, compared with {run.yardstick}", "bold")
        page.table(*differences)
        page.pairs(describe_parity(run))
    if run.error:
        page.pairs([("runtime", shortened(run.error, 1200))])
    page.pairs(describe_fault_location(run))
    if (parts := tabulate_parts(run)) is not None:
        page.line(f"  {run.experiment}, the parts of the model in standard deviations", "bold")
        page.table(*parts)


def show_repair(page: Page, report: Report, record: RepairRecord, show_diff: bool) -> None:
    """Print the changes and their repairs, the proof, and what could not be repaired."""
    if record.export is not None:
        page.line("")
        page.line(format_export_title(record.export), "bold")
        page.pairs(describe_export(record.export, record.source))
    if record.changes:
        _show_changes(page, record)
        if show_diff:
            _show_diffs(page, record)
    if record.changes or record.export is not None:
        page.line("proof", "bold")
        for entry in record.proof:
            detail = f": {entry.detail}" if entry.detail else ""
            text = f"  {'holds' if entry.holds else 'FAILS'}  {entry.stack}: {entry.claim}{detail}"
            page.line(text, "green" if entry.holds else "red", hang=7)
        for line in record.bases:
            page.line(f"  {line}", hang=2)
        for line in list_costs(report):
            page.line(f"  {line}", "dim")
    show_cache_costs(page, record, whole=True)
    for one in record.not_repaired:
        page.line(format_not_repaired(one), "yellow")
    if record.out is not None:
        page.line(format_copy(record), "bold")


def show_cache_costs(page: Page, record: RepairRecord, whole: bool) -> None:
    """Print what a narrower type of the cache costs: all of it, or what a copy has and the layers that cost most."""
    for made in tabulate_cache_costs(record, whole):
        page.line("")
        page.line(made.title, "bold")
        page.table(made.header, made.rows)
        for line in made.lines:
            page.line(f"  {line}")


def _show_changes(page: Page, record: RepairRecord) -> None:
    """The changes, node by node."""
    page.line("")
    page.line(f"changed: {format_count(len(record.changes), 'place')}; {list_repair_names(record)}", "bold")
    for change in record.changes:
        page.line(f"  {change.file}: {change.where}")
        page.line(f"  - {change.before}", "red")
        page.line(f"  + {change.after}", "green")


def _show_diffs(page: Page, record: RepairRecord) -> None:
    """The changed lines of each graph."""
    for found in record.diff:
        page.line(f"graph {found.file}", "bold")
        for line in found.lines:
            page.line(f"  {line}", {"-": "red", "+": "green"}.get(line[:1], "dim"))
        if found.left_out:
            page.line(f"  ... and {found.left_out} more lines", "dim")
