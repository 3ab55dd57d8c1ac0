"""Chooses an exporter, runs it in a Python of its own, and writes the recipe next to the model: script, pins, command.

The exporter and its flags are as asked for, else from the diagnosis of the model that is replaced, each with its
reason. An export has the decoders and the interface of that model.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import describe
from kvdoctor.errors import KvdoctorError
from kvdoctor.options import ReExportChoices
from kvdoctor.records import record
from kvdoctor.repair.export.exporters import ASKED, EXPORTERS, SOME_TAKE, Exporter, SourceFacts, find_exporter
from kvdoctor.report.document import Report
from kvdoctor.report.facts import FileFacts
from kvdoctor.report.repair_record import ExportChoice, PortChange, RepairSide
from kvdoctor.runtime.environments import EnvironmentUnavailable, ScriptFailed, ScriptLog, ScriptProcess

DTYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The element types of a cache by the names that exporters use."""
SCRIPTS = Path(__file__).parent / "scripts"
RUN = "run.py"
FOLDER = "kvdoctor-export"
"""The folder in OUT with the scripts, pins and command."""
COMMAND = "python run.py arguments.json"


@record(slots=False)
class SourceModel:
    """The model that is replaced: facts for the choice of an exporter, its findings, and its files as in a report."""

    facts: SourceFacts
    before: RepairSide
    files: tuple[FileFacts, ...]


def no_source(checkpoint: str) -> SourceModel:
    """The facts if there is no model to replace."""
    return SourceModel(SourceFacts(name=checkpoint), RepairSide("nothing-found", ()), ())


def read_source(report: Report) -> SourceModel:
    """The facts in a report."""
    files, contracts = report.model.files, [stack.contract for stack in report.stacks if stack.contract is not None]
    decoders = (file.opsets for file in files if "decoder" in file.role)
    facts = SourceFacts(
        name=report.model.path,
        layouts=tuple(stack.layout for stack in report.stacks if stack.contract is not None),
        roles=tuple(dict.fromkeys(file.role for file in files)),
        opset=max(filter(None, (opsets.get("", opsets.get("ai.onnx")) for opsets in decoders)), default=None),
        dtype=next((slot.dtype for contract in contracts for slot in contract.slots), None),
        faults=tuple(dict.fromkeys(found.name for found in report.findings if found.severity != "note")),
    )
    return SourceModel(facts, RepairSide(report.verdict, report.findings), files)


DECODERS = ("decoder-merged", "decoder", "decoder-with-past")


def delete_surplus_decoders(folder: Path, known: SourceModel) -> tuple[str, ...]:
    """Delete decoders that the replaced model does not have, if all of its own are there; gives their names."""
    if not known.facts.roles:
        return ()
    files = open_folder(str(folder)).files
    wanted = set(known.facts.roles).intersection(DECODERS)
    if not wanted or not wanted <= {file.role for file in files}:
        return ()
    surplus = [file for file in files if file.role in DECODERS and file.role not in wanted]
    shared = {external.path for file in files if file not in surplus for external in file.external}
    for file in surplus:
        file.path.unlink()
        for external in file.external:
            if external.path not in shared and external.path.is_relative_to(folder):
                external.path.unlink(missing_ok=True)
    return tuple(file.name for file in surplus)


def compare_ports(known: SourceModel, files: tuple[FileFacts, ...]) -> Iterator[PortChange]:
    """Inputs and outputs that differ from the replaced model, in files of the same name or role."""
    for file in files:
        named = [other for other in known.files if other.path == file.path]
        same = [other for other in known.files if other.role == file.role]
        alone = len(same) == 1 and sum(other.role == file.role for other in files) == 1
        for before in (named or (same if alone else []))[:1]:
            for sides in ((before.inputs, file.inputs), (before.outputs, file.outputs)):
                was, now = ({str(port["name"]): port for port in ports} for ports in sides)
                for name in dict.fromkeys([*was, *now]):
                    if not _is_compatible(was.get(name), now.get(name)):
                        types = (None if port is None else _describe(port) for port in (was.get(name), now.get(name)))
                        yield PortChange(file.path, name, *types)


def _is_compatible(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a caller feeds and reads both in the same way; names of free axes do not matter."""
    if was is None or now is None or was.get("dtype") != now.get("dtype"):
        return False
    old, new = was.get("shape"), now.get("shape")
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(a == b or not isinstance(b, int) for a, b in zip(old, new, strict=True))


def _describe(port: dict[str, Any]) -> str:
    return str(port.get("dtype")) if port.get("shape") is None else describe(str(port.get("dtype")), port["shape"])


@record
class ExportPlan:
    """An exporter with its flags, and the reasons for them."""

    exporter: Exporter
    opset: int | None
    dtype: str
    task: str | None
    flags: dict[str, Any]
    choices: tuple[ExportChoice, ...]


def list_plans(request: ReExportChoices, source: SourceFacts) -> Iterator[ExportPlan]:
    """The plans for an export, the best first; the others are for the case that an exporter fails."""
    exporter, why = _choose_exporter(request, source)
    first = _make_plan(request, source, exporter, why)
    yield first
    if first.opset is not None and request.opset is None:
        because = f"with the opset {first.opset} of {source.name} it fails"
        own = ExportChoice("opset", "the exporter's own", because)
        yield replace(first, opset=None, choices=tuple(own if c.what == "opset" else c for c in first.choices))
    if request.exporter is None:
        for other in EXPORTERS:
            if other.name != exporter.name and not other.own_layout and supports(other, request):
                yield _make_plan(request, source, other, f"{exporter.name} cannot export it")


def _choose_exporter(request: ReExportChoices, source: SourceFacts) -> tuple[Exporter, str]:
    if request.exporter is not None:
        return find_exporter(request.exporter), ASKED
    for exporter in EXPORTERS:
        layout = next((layout for layout in source.layouts if layout.startswith(exporter.writes)), None)
        if layout is not None and supports(exporter, request):
            return exporter, f"{source.name} has its layout, {layout}"
    default = next(exporter for exporter in EXPORTERS if supports(exporter, request))
    if not source.layouts:
        return default, "nothing else was asked for, and most loops know its names"
    layout = f"the layout of {source.name}, {source.layouts[0]}"
    return default, f"no exporter writes {layout}; most loops know these names"


def supports(exporter: Exporter, request: ReExportChoices) -> bool:
    """Whether an exporter supports the options of the user."""
    fits = request.opset is None or (exporter.opsets is not None and request.opset in _span(exporter))
    fits = fits and all(getattr(request, name) is None or name in exporter.takes for name in SOME_TAKE)
    return fits and (request.dtype is None or request.dtype in exporter.dtypes)


def _span(exporter: Exporter) -> range:
    return range(exporter.opsets[0], exporter.opsets[1] + 1) if exporter.opsets is not None else range(0)


def _make_plan(request: ReExportChoices, source: SourceFacts, exporter: Exporter, why: str) -> ExportPlan:
    opset, opset_choice = _choose_opset(request, source, exporter)
    dtype, dtype_choice = _choose_dtype(request, source, exporter)
    flags, choices = exporter.flags(source, request)
    faults = f"; it has {', '.join(source.faults)}" if source.faults and why != ASKED else ""
    decided = (ExportChoice("exporter", exporter.name, why + faults), opset_choice, dtype_choice)
    task = (ExportChoice("task", request.task, ASKED),) if request.task is not None else ()
    return ExportPlan(exporter, opset, dtype, request.task, flags, (*decided, *task, *choices))


def _choose_opset(request: ReExportChoices, source: SourceFacts, exporter: Exporter) -> tuple[int | None, ExportChoice]:
    if request.opset is not None:
        return request.opset, ExportChoice("opset", str(request.opset), ASKED)
    theirs = source.opset
    if theirs is not None and theirs in _span(exporter):
        return theirs, ExportChoice("opset", str(theirs), f"that of {source.name}")
    why = "nothing else was asked for"
    if theirs is not None:
        why = f"{source.name} has {theirs}, which {exporter.name} "
        why += "does not let you choose" if exporter.opsets is None else "cannot write"
    return None, ExportChoice("opset", "the exporter's own", why)


def _choose_dtype(request: ReExportChoices, source: SourceFacts, exporter: Exporter) -> tuple[str, ExportChoice]:
    if request.dtype is not None:
        return request.dtype, ExportChoice("dtype", request.dtype, ASKED)
    theirs = DTYPES.get(source.dtype or "")
    if theirs is not None and theirs in exporter.dtypes:
        return theirs, ExportChoice("dtype", theirs, f"that of the cache of {source.name}")
    why = "nothing else was asked for"
    if source.dtype is not None:
        why = f"the cache of {source.name} is {source.dtype}, which {exporter.name} does not write"
    return "fp32", ExportChoice("dtype", "fp32", why)


class ExportFailed(KvdoctorError):
    """No export could be made. The message is short and says what to do next."""


@record(slots=False)
class ExportedModel:
    """An export in its folder: its plan, how the Python was provided, and the failures of earlier plans."""

    plan: ExportPlan
    way: str
    versions: dict[str, str]
    failures: tuple[str, ...]


@record(slots=False)
class ExportWorkspace:
    """The place of an export: the checkpoint, an empty folder, a log, and a listener for progress messages."""

    checkpoint: str
    folder: Path
    log: IO[str]
    offline: bool
    announce: Callable[[str], None] | None = None


def run_first_working(plans: Iterable[ExportPlan], workspace: ExportWorkspace) -> ExportedModel:
    """Try one plan after the other; gives the export of the first that works.

    Raises:
        ExportFailed: none works, its Python cannot be had, or the checkpoint cannot be loaded.
    """
    failures: list[str] = []
    advice = ""
    for plan in plans:
        name = plan.exporter.name
        workspace.log.write(f"# {name}: {json.dumps(script_arguments(plan, workspace.checkpoint, 'OUT'))}\n")
        try:
            way, versions = _run_exporter(plan, workspace)
        except EnvironmentUnavailable as reason:
            failures.append(f"{name}: {reason}")
            break
        except ScriptFailed as reason:
            message = str(reason).replace(str(workspace.folder), "OUT")
            failures.append(f"{name} ({plan.dtype}, opset {plan.opset or 'of its own'}): {message}")
            workspace.log.write(f"# {failures[-1]}\n")
            others = [one.name for one in EXPORTERS if one is not plan.exporter and plan.dtype in one.dtypes]
            ways = [f"--exporter {' or '.join(others)}", *(["--dtype fp32"] if plan.dtype != "fp32" else [])]
            advice = f"; try {', or '.join(ways)}"
            if reason.facts.get("stage") == "weights":
                advice = "; give a checkpoint whose config and weights belong together, as save_pretrained writes it"
                break
        else:
            if any(workspace.folder.rglob("*.onnx")):
                return ExportedModel(plan, way, versions, tuple(failures))
            failures.append(f"{name}: it wrote no ONNX file")
        for path in workspace.folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    raise ExportFailed("; ".join(failures) + advice)


def script_arguments(plan: ExportPlan, checkpoint: str, out: str, local: bool = False) -> dict[str, Any]:
    """The arguments of run.py."""
    return {
        "script": plan.exporter.script,
        "checkpoint": checkpoint,
        "out": out,
        "local": local,
        "task": plan.task,
        "dtype": plan.dtype,
        "opset": plan.opset,
        "flags": plan.flags,
    }


def write_recipe(target: Path, made: ExportedModel, checkpoint: str, log: Path) -> None:
    """Write the recipe next to the model: the scripts, their arguments, the pins, and the log.

    Raises:
        OSError: a file cannot be written.
    """
    folder = target / FOLDER
    folder.mkdir()
    plan = made.plan
    for script in (RUN, plan.exporter.script):
        shutil.copyfile(SCRIPTS / script, folder / script)
    shutil.copyfile(log, folder / "log.txt")
    arguments = script_arguments(plan, checkpoint, "out")
    versions = "".join(f"# {name} {version} was used\n" for name, version in sorted(made.versions.items()))
    pins = "\n".join(plan.exporter.needs.requirements)
    texts = {
        "arguments.json": json.dumps(arguments, indent=2),
        "requirements.txt": f"# had by: {made.way}\n{versions}{pins}",
        "command.txt": f"pip install -r requirements.txt\n{COMMAND}",
    }
    for name, text in texts.items():
        (folder / name).write_text(f"{text}\n", encoding="utf-8", newline="\n")


def _run_exporter(plan: ExportPlan, workspace: ExportWorkspace) -> tuple[str, dict[str, str]]:
    local = workspace.offline or Path(workspace.checkpoint).is_dir()
    arguments = {**script_arguments(plan, workspace.checkpoint, str(workspace.folder), local), "watched": True}
    script = ScriptProcess(
        SCRIPTS / RUN, arguments, plan.exporter.needs, workspace.offline, ScriptLog(workspace.log, workspace.announce)
    )
    try:
        answer = script.ask()
        return script.way, {str(name): str(version) for name, version in answer["versions"].items()}
    finally:
        script.stop()
