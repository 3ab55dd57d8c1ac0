"""Runs an exporter in a Python of its own, and writes the recipe beside the model: script, pins and command."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from kvdoctor.errors import KvdoctorError
from kvdoctor.records import record
from kvdoctor.repair.export.choose_exporter import ExportPlan
from kvdoctor.repair.export.exporters.registry import load
from kvdoctor.runtime.environments import EnvironmentUnavailable, ScriptFailed, ScriptLog, ScriptProcess

SCRIPTS = Path(__file__).parent / "scripts"
RUN = "run.py"
FOLDER = "kvdoctor-export"
"""The folder in OUT with the scripts, pins and command."""
COMMAND = "python run.py arguments.json"


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
            advice = _advice(plan)
            if reason.facts.get("stage") == "weights":
                advice = "; give a checkpoint whose config and weights belong together, as save_pretrained writes it"
                break
        else:
            if any(workspace.folder.rglob("*.onnx")):
                return ExportedModel(plan, way, versions, tuple(failures))
            failures.append(f"{name}: it wrote no ONNX file")
        _empty(workspace.folder)
    raise ExportFailed("; ".join(failures) + advice)


def _advice(plan: ExportPlan) -> str:
    """Other options to try after an exporter failed."""
    others = [exporter.name for exporter in load() if exporter is not plan.exporter and plan.dtype in exporter.dtypes]
    ways = [f"--exporter {' or '.join(others)}", *(["--dtype fp32"] if plan.dtype != "fp32" else [])]
    return f"; try {', or '.join(ways)}"


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
    """Write the recipe beside the model: the scripts, their arguments, the pins, and the log.

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
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8", newline="\n")
    versions = "".join(f"# {name} {version} was used\n" for name, version in sorted(made.versions.items()))
    pins = "\n".join(plan.exporter.needs.requirements)
    (folder / "requirements.txt").write_text(
        f"# had by: {made.way}\n{versions}{pins}\n", encoding="utf-8", newline="\n"
    )
    (folder / "command.txt").write_text(f"pip install -r requirements.txt\n{COMMAND}\n", encoding="utf-8", newline="\n")


def _run_exporter(plan: ExportPlan, workspace: ExportWorkspace) -> tuple[str, dict[str, str]]:
    local = workspace.offline or Path(workspace.checkpoint).is_dir()
    arguments = {**script_arguments(plan, workspace.checkpoint, str(workspace.folder), local), "watched": True}
    script = ScriptProcess(
        SCRIPTS / RUN, arguments, plan.exporter.needs, workspace.offline, ScriptLog(workspace.log, workspace.announce)
    )
    try:
        answer = script.wait()
        return script.way, {str(name): str(version) for name, version in answer["versions"].items()}
    finally:
        script.stop()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
