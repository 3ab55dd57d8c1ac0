"""The report for a terminal or a log: colour and wrapping on a terminal, one line per fact in a pipe."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdoctor.findings import Finding
from kvdoctor.memory import MemoryPlan
from kvdoctor.report import cure_text, export_text, layout, matrix, parity_text, plan_text, wording
from kvdoctor.report.document import RepairRecord, Report, StackFacts
from kvdoctor.report.safe import LONGEST_QUOTED, printable, shortened
from kvdoctor.trace import Run

if TYPE_CHECKING:
    from collections.abc import Iterable

STYLES = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan", "passed": "green", "failed": "red"}
VERDICTS = {"healthy": "bold green", "unhealthy": "bold red", "incomplete": "bold yellow", "nothing-found": "bold"}
PIPE_WIDTH = 4096
LABEL_WIDTH = 11


def render(report: Report, console: Console, verbosity: int = 0, show_diff: bool = False) -> None:
    """Print a report. `verbosity`: -1 findings and verdict alone, 0 as usual, 1 with every step and every port."""
    page = _Page(console, verbosity)
    if verbosity >= 0:
        page.head(report)
        for stack in report.stacks:
            page.stack(stack, report)
        if report.command == "inspect":
            page.ports(report)
        page.repair(report, show_diff)
        page.notes(report)
    page.findings(report)
    if verbosity < 0 and report.repair is not None:
        page.line(cure_text.outcome_line(report.repair), "bold")
    if made := wording.reproducer_line(report):
        page.line(made, "bold")
    page.line(wording.verdict_line(report), VERDICTS[report.verdict])


def render_gate(reports: list[Report], last: tuple[str, ...], console: Console, verbosity: int = 0) -> None:
    """Print the reports of a gate: of several models the healthy ones in a line each, the others in full.

    `last` are the lines that are said of all models.
    """
    page = _Page(console, verbosity)
    behind_one_in_full = False
    for report in reports:
        in_short = len(reports) > 1 and verbosity <= 0 and report.verdict == "healthy"
        if report is not reports[0] and (behind_one_in_full or not in_short):
            page.line("")
        if in_short:
            page.line(wording.verdict_line(report), VERDICTS[report.verdict])
            page.known(report)
        else:
            render(report, console, verbosity)
        behind_one_in_full = not in_short
    if last:
        page.line("")
    for line in last:
        page.line(printable(line), "bold")


def _style(finding: Finding) -> str:
    return "dim" if finding.known is not None else STYLES[finding.severity]


def render_contracts(report: Report, console: Console) -> None:
    """Print the cache contract of each stack and nothing else."""
    page = _Page(console, 0)
    for stack in report.stacks:
        page.line(stack.name, "bold")
        page.pairs(wording.contract_rows(stack))


class _Page:
    def __init__(self, console: Console, verbosity: int) -> None:
        self.console, self.verbosity = console, verbosity

    def line(self, text: str, style: str = "", hang: int = 2) -> None:
        """One line; only a terminal wraps it, and indents what follows by `hang` more than it begins with."""
        short = printable(shortened(text, LONGEST_QUOTED))
        if not self.console.is_terminal:
            self.console.print(Text(short, style), soft_wrap=True)
            return
        body = short.lstrip(" ")
        for part in layout.wrapped(self.console, Text(body, style), len(short) - len(body), hang):
            self.console.print(part, soft_wrap=True)

    def pairs(self, rows: "Iterable[tuple[str, str]]", indent: int = 2) -> None:
        """Label and text, the text wrapped under itself."""
        if not self.console.is_terminal:
            for label, text in rows:
                self.line(f"{' ' * indent}{label:<{LABEL_WIDTH}}{text}")
            return
        grid = Table.grid(padding=(0, 0))
        grid.add_column(width=indent + LABEL_WIDTH, no_wrap=True)
        grid.add_column(overflow="fold")
        for label, text in rows:
            grid.add_row(Text(" " * indent + label, "dim"), Text(printable(shortened(text, LONGEST_QUOTED))))
        self.console.print(grid)

    def table(self, header: list[str], rows: list[list[str]], styled: int = -1) -> None:
        """A table without rules, indented by two."""
        cells = [[layout.Cell(printable(shortened(cell))) for cell in row] for row in rows]
        if styled >= 0:
            for row in cells:
                text = row[styled].text
                row[styled] = layout.Cell(text, STYLES.get(text.partition(" ")[0], ""))
        for line in layout.rows(self.console, header, cells):
            self.console.print(line, soft_wrap=True)

    def head(self, report: Report) -> None:
        versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
        self.line(f"kvdoctor {report.command} {report.model.path}", "bold")
        self.line(versions, "dim")
        if report.command != "gate" and report.arguments.get("policy") is not None:
            self.line(f"policy {report.arguments['policy']}", "dim")
        if report.command == "inspect":
            self.line("")
            rows = [wording.file_row(file) for file in report.model.files]
            self.table(["file", "role", "size", "IR", "opsets", "producer"], rows)
            for line in matrix.limits(report):
                self.line(f"  {line}", "dim")

    def known(self, report: Report) -> None:
        """Known findings in short: what a team lives with stays in sight."""
        for finding in report.findings:
            if (reason := wording.known_reason(finding)) is not None:
                self.line(f"  {shortened(wording.headline(finding), 600)}", "dim")
                self.pairs([("known", shortened(reason, 900))], 4)

    def stack(self, stack: StackFacts, report: Report) -> None:
        self.line("")
        runs = matrix.runs_here(report, stack.name)
        if report.command == "inspect":
            self.line(f"{stack.name}: the cache contract", "bold")
            self.pairs(wording.contract_rows(stack))
            asked = self.verbosity > 0 or plan_text.is_asked(report.arguments)
            if asked and stack.cache is not None and stack.cache.parts:
                self.plan(stack.name, stack.cache)
        elif runs:
            self.runs(stack, runs, report)
            self.targets(stack, report)
        else:
            self.line(f"{stack.name} ({stack.layout}): no decode step was run", "bold")

    def plan(self, stack: str, plan: MemoryPlan) -> None:
        """The memory plan of a stack."""
        self.line("")
        self.line(f"{stack}: {plan_text.title(plan)}", "bold")
        self.pairs(plan_text.rows(plan))
        for table in (plan_text.alternatives(plan), plan_text.paged(plan)):
            if table is not None:
                self.line("")
                self.table(*table)
        if assumptions := list(plan_text.assumptions(plan)):
            self.line("")
            self.pairs(assumptions)

    def ports(self, report: Report) -> None:
        """Inputs and outputs of every file that decodes or encodes."""
        used = {name for stack in report.stacks for name in stack.files}
        for file in report.model.files:
            if file.path in used or not report.stacks:
                self.line("")
                self.line(f"{file.path}: inputs and outputs", "bold")
                rows = list(wording.port_rows(file, everything=self.verbosity > 0))
                self.table(["", "name", "type"], rows)

    def runs(self, stack: StackFacts, runs: list[Run], report: Report) -> None:
        """All runs of a stack with a finding; one line for a stack where nothing was found."""
        from kvdoctor.experiments import load

        known = {experiment.name: experiment for experiment in load()}
        done = [run for run in runs if run.outcome != "skipped"]
        judged = [run for run in done if run.experiment in known and known[run.experiment].judged]
        # Of a loop that feeds an emptied cache back the findings speak, also where they are notes only.
        sound = judged and all(run.shows == "passed" or run.experiment == "plain-loop" for run in judged)
        sick = any(f.stack == stack.name and f.severity != "note" for f in report.findings)
        open_ends = any(entry.stack == stack.name and entry.essential for entry in report.not_checked)
        if sound and not (sick or open_ends or self.verbosity > 0):
            judged = [run for run in judged if run.shows == "passed"]
            names = ", ".join(run.experiment for run in judged if known[run.experiment].shown)
            self.line(f"{stack.name} ({stack.layout}): {names} passed", "bold green")
            self.cost(stack, report)
            return
        self.line(f"{stack.name} ({stack.layout}); differences of logits as fractions of their spread", "bold")
        rows = []
        for run in done if self.verbosity <= 0 else runs:
            experiment = known.get(run.experiment)
            if experiment is None or experiment.shown or self.verbosity > 0:
                why = experiment.why if experiment and not experiment.judged else ""
                asked = experiment.question if experiment and self.verbosity > 0 else ""
                detail = ": ".join(filter(None, (asked, wording.detail(run, why))))
                rows.append([run.experiment, wording.outcome(run), detail])
        self.table(["experiment", "outcome", ""], rows, styled=1)
        self.cost(stack, report)
        for run in done:
            if self.verbosity > 0 or run.experiment == self.shown_steps(done):
                self.steps(run, stack)

    def targets(self, stack: StackFacts, report: Report) -> None:
        """What the stack shows under each target."""
        for header, rows in matrix.matrices(report, stack.name):
            self.line(f"  {stack.name} under each target", "bold")
            self.table(header, rows)
        for line in matrix.legend(report):
            self.line(f"  {line}", "dim")

    @staticmethod
    def shown_steps(runs: list[Run]) -> str | None:
        """The run whose steps are worth showing: the first loop that did not pass."""
        loops = ("plain-loop", "held-loop", "empty-past", "batch", "other-encoder-length")
        bad = [run for run in runs if run.experiment in loops and run.outcome not in ("passed", "skipped")]
        return bad[0].experiment if bad else None

    def steps(self, run: Run, stack: StackFacts) -> None:
        if not run.steps or stack.contract is None:
            return
        self.line(f"  {run.experiment}, step by step", "bold")
        self.table(*wording.steps_table(run, stack.contract))
        if self.verbosity > 0 and (differences := parity_text.differences_table(run)) is not None:
            self.line(f"  {run.experiment}, against {run.yardstick}", "bold")
            self.table(*differences)
            self.pairs(parity_text.facts(run))
        if run.error:
            self.pairs([("runtime", shortened(run.error, 1200 if self.verbosity > 0 else 320))])
        if self.verbosity > 0:
            self.pairs(wording.place_rows(run))

    def cost(self, stack: StackFacts, report: Report) -> None:
        measured = report.measured.get(stack.name, {}).get("step_seconds", {})
        line = wording.cost_line(measured)
        if line:
            self.line(f"  {line}", "dim")

    def repair(self, report: Report, show_diff: bool) -> None:
        """What was changed and by which repairs, what proves it, and what could not be repaired."""
        record = report.repair
        if record is None:
            return
        if record.export is not None:
            self.line("")
            self.line(export_text.title(record.export), "bold")
            self.pairs(export_text.rows(record.export, record.source))
        if record.changes:
            self.changes(record, show_diff or self.verbosity > 0)
            self.diffs(record, show_diff)
        if record.changes or record.export is not None:
            self.line("proof", "bold")
            for entry in record.proof:
                detail = f": {entry.detail}" if entry.detail else ""
                style = "green" if entry.holds else "red"
                self.line(
                    f"  {'holds' if entry.holds else 'FAILS'}  {entry.stack}: {entry.claim}{detail}", style, hang=7
                )
            for line in cure_text.cost_lines(report):
                self.line(f"  {line}", "dim")
        for unmended in record.unmended:
            self.line(cure_text.unmended_line(unmended), "yellow")
        if record.out is not None:
            self.line(cure_text.outcome_line(record), "bold")

    def changes(self, record: RepairRecord, everything: bool) -> None:
        """The changes, node by node; without `everything` the first two."""
        self.line("")
        count = len(record.changes)
        self.line(f"changed: {count} place{'s' * (count > 1)}, by {cure_text.repair_names(record)}", "bold")
        for change in record.changes if everything else record.changes[:2]:
            self.line(f"  {change.file}: {change.where}")
            self.line(f"  - {change.before}", "red")
            self.line(f"  + {change.after}", "green")
        if len(record.changes) > 2 and not everything:
            more = len(record.changes) - 2
            self.line(f"  ... and {more} more like these (all with --diff or in the fix report)", "dim")

    def diffs(self, record: RepairRecord, show_diff: bool) -> None:
        """What is other in each graph, line by line."""
        for found in record.diff if show_diff else ():
            self.line(f"graph {found.file}", "bold")
            for line in found.lines:
                self.line(f"  {line}", {"-": "red", "+": "green"}.get(line[:1], "dim"))
            if found.left_out:
                self.line(f"  ... and {found.left_out} lines more", "dim")

    def notes(self, report: Report) -> None:
        for note in report.notes:
            self.line(f"note: {note}", "dim")

    def findings(self, report: Report) -> None:
        for finding in report.findings:
            if self.verbosity < 0 or finding.severity != "note" or self.verbosity > 0 or report.command == "inspect":
                self.line("")
                self.line(shortened(wording.headline(finding), 600), _style(finding))
                self.pairs((label, shortened(text, 900)) for label, text in wording.evidence(finding))
            else:
                self.line("")
                self.line(shortened(wording.headline(finding)), _style(finding))
        for entry in report.not_checked:
            stack = f" ({entry.stack})" if entry.stack else ""
            self.line(f"not checked: {entry.code}{stack} {shortened(entry.reason, 600)}", "yellow")
        self.line("")
