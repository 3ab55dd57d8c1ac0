"""Runs an exporter in its Python, and writes beside the model what it was told: script, pins and command."""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvdoctor.afresh.choosing import Plan
from kvdoctor.errors import KvdoctorError
from kvdoctor.export.environments import Script, ScriptFailed, Unavailable, Watch
from kvdoctor.export.exporters import load

SCRIPTS = Path(__file__).parents[1] / "export" / "scripts"
RUN = "run.py"
FOLDER = "kvdoctor-export"
"""Where in OUT the scripts, pins and command stand."""
COMMAND = "python run.py arguments.json"


class NotMade(KvdoctorError):
    """No export could be made. The message is short, and says what to do next."""


@dataclass(frozen=True)
class Made:
    """An export in its folder, how it was made, and what was tried before in vain."""

    plan: Plan
    way: str
    versions: dict[str, str]
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Bench:
    """Where an export is made: the checkpoint, an empty folder, a log, and who is told what is being done."""

    checkpoint: str
    folder: Path
    log: IO[str]
    offline: bool
    told: Callable[[str], None] | None = None


def make(plans: Iterable[Plan], bench: Bench) -> Made:
    """Try one plan after the other; gives the first that works.

    Raises:
        NotMade: none works, its Python cannot be had, or the checkpoint cannot be loaded.
    """
    failures: list[str] = []
    advice = ""
    for plan in plans:
        name = plan.exporter.name
        bench.log.write(f"# {name}: {json.dumps(arguments(plan, bench.checkpoint, 'OUT'))}\n")
        try:
            way, versions = _run(plan, bench)
        except Unavailable as reason:
            failures.append(f"{name}: {reason}")
            break
        except ScriptFailed as reason:
            said = str(reason).replace(str(bench.folder), "OUT")
            failures.append(f"{name} ({plan.dtype}, opset {plan.opset or 'of its own'}): {said}")
            bench.log.write(f"# {failures[-1]}\n")
            advice = _advice(plan)
            if reason.facts.get("stage") == "weights":
                advice = "; give a checkpoint whose config and weights belong together, as save_pretrained writes it"
                break
        else:
            if any(bench.folder.rglob("*.onnx")):
                return Made(plan, way, versions, tuple(failures))
            failures.append(f"{name}: it wrote no ONNX file")
        _empty(bench.folder)
    raise NotMade("; ".join(failures) + advice)


def _advice(plan: Plan) -> str:
    """What may go where an exporter failed."""
    others = [exporter.name for exporter in load() if exporter is not plan.exporter and plan.dtype in exporter.dtypes]
    ways = [f"--exporter {' or '.join(others)}", *(["--dtype fp32"] if plan.dtype != "fp32" else [])]
    return f"; try {', or '.join(ways)}"


def arguments(plan: Plan, checkpoint: str, out: str, local: bool = False) -> dict[str, Any]:
    """What run.py is told."""
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


def write_recipe(target: Path, made: Made, checkpoint: str, log: Path) -> None:
    """Write beside the model what made it: the scripts, what they were told, the pins, and the log.

    Raises:
        OSError: a file cannot be written.
    """
    folder = target / FOLDER
    folder.mkdir()
    plan = made.plan
    for script in (RUN, plan.exporter.script):
        shutil.copyfile(SCRIPTS / script, folder / script)
    shutil.copyfile(log, folder / "log.txt")
    told = arguments(plan, checkpoint, "out")
    (folder / "arguments.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    versions = "".join(f"# {name} {version} was used\n" for name, version in sorted(made.versions.items()))
    pins = "\n".join(plan.exporter.needs.requirements)
    (folder / "requirements.txt").write_text(f"# had by: {made.way}\n{versions}{pins}\n", encoding="utf-8")
    (folder / "command.txt").write_text(f"pip install -r requirements.txt\n{COMMAND}\n", encoding="utf-8")


def _run(plan: Plan, bench: Bench) -> tuple[str, dict[str, str]]:
    local = bench.offline or Path(bench.checkpoint).is_dir()
    told = {**arguments(plan, bench.checkpoint, str(bench.folder), local), "watched": True}
    script = Script(SCRIPTS / RUN, told, plan.exporter.needs, bench.offline, Watch(bench.log, bench.told))
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
