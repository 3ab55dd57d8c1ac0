"""What is handed over: the files without weights, the program, and a README for the issue tracker."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor import __version__
from kvdoctor.doctor import Options
from kvdoctor.facts import file_facts
from kvdoctor.findings import Finding
from kvdoctor.model_folder import ModelFolder
from kvdoctor.out_folder import REPRO_MARK
from kvdoctor.report.document import Report, Reproducer
from kvdoctor.report.safe import code, markdown
from kvdoctor.repro.candidate import Candidate
from kvdoctor.repro.program import STORE, Wording, program
from kvdoctor.repro.witness import Difference, Shown
from kvdoctor.script import Script
from kvdoctor.trace import Run

SCHEMA = "kvdoctor/repro/1"


@dataclass(frozen=True)
class Handover:
    """All that is known when a reproducer is written."""

    finding: Finding
    run: Run | None
    folder: ModelFolder
    report: Report
    options: Options
    found: Candidate
    yardstick: "Shown | Difference"

    @property
    def script(self) -> Script:
        """The script in the sizes that are handed over."""
        return self.found.script if self.found.script.kind == "differs" else self.found.resized_script()

    @property
    def node(self) -> str:
        """The node that the error must name, as the file has it; empty where none is named."""
        shown = self.yardstick
        return shown.node if isinstance(shown, Shown) and "optimisations only" not in shown.words else ""


def write(target: Path, handover: Handover, request: Any) -> Reproducer:
    """Write everything into a folder."""
    names = _names(handover)
    tally = handover.found.write(target, handover.options.seed, names)
    text, stored = program(handover.script, _wording(handover), names)
    (target / "reproduce.py").write_text(text, encoding="utf-8", newline="\n")
    if stored:
        np.savez(target / STORE, **stored)  # type: ignore[arg-type]
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    (target / "README.md").write_text(_readme(handover, names, tally, files), encoding="utf-8", newline="\n")
    (target / REPRO_MARK).write_text(_mark(handover, target, names), encoding="utf-8", newline="\n")
    return Reproducer(
        out=request.out,
        reason=None,
        finding=handover.finding.fingerprint,
        shows=_what(handover),
        files=tuple(sorted(path.name for path in target.iterdir())),
        bytes=sum(path.stat().st_size for path in target.iterdir()),
        left_out=handover.found.cuts,
    )


def _names(handover: Handover) -> dict[str, str]:
    """The files as they are handed over: the one that decodes is `model.onnx`."""
    script = handover.script
    files = list(dict.fromkeys([*script.files, *(call.file for call in reversed(script.calls))]))
    names = {file: f"model_{index}.onnx" for index, file in enumerate(files)}
    main = handover.found.contract.graph("decode").file
    names |= {main: "model.onnx"} if main in names else {files[0]: "model.onnx"}
    return {
        file: "first_step.onnx" if name.startswith("model_") and len(files) == 2 else name
        for file, name in names.items()
    }


def _what(handover: Handover) -> str:
    """What is seen, in a few words without names."""
    script, run = handover.script, handover.run
    if script.kind == "refused":
        return "the runtime refuses the file"
    if script.kind == "differs":
        return f"the logits of the {run.experiment if run else 'loop'} differ from a run without the cache"
    title = script.calls[-1].title
    return f"{title} fails" if script.kind == "fails" else f"{title} takes the process with it"


def _wording(handover: Handover) -> Wording:
    finding, script = handover.finding, handover.script
    op = f" in {handover.run.node.op}" if handover.run is not None and handover.run.node is not None else ""
    return Wording(
        title=f"{finding.code} {finding.name}: {_what(handover)}{op if script.kind == 'fails' else ''}.",
        failing=script.calls[-1].title if script.calls else "",
        node=handover.node,
        provider=handover.options.provider,
        exactness=handover.found.contract.exactness,
        seconds=handover.options.limits.timeout,
    )


def _readme(handover: Handover, names: dict[str, str], tally: Any, files: dict[str, int]) -> str:
    finding, run, report = handover.finding, handover.run, handover.report
    node = f" in {markdown(run.node.op)} {code(run.node.name)}" if run is not None and run.node is not None else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    lines = [
        f"# {finding.code} {finding.name}: {_what(handover)}",
        "",
        f"{markdown(finding.cause)}",
        "",
        f"- what fails: {_what(handover)}{node}",
        f"- place: {markdown(finding.where)}",
        f"- expected: {markdown(finding.promised)}",
        f"- observed: {markdown(finding.observed)}",
        *(f"- follows: {markdown(text)}" for text in finding.follows),
        f"- seen with: {markdown(versions)}",
        "",
        "## Run it",
        "",
        "```sh",
        "pip install onnxruntime numpy",
        "python reproduce.py",
        "```",
        "",
        *_exit_codes(handover),
        "",
        "## What is in it",
        "",
        *(f"- `{name}`: {size:,} bytes" for name, size in files.items()),
        "",
        *_origin(handover, names),
        "",
        *_kept(handover, tally),
        "",
        f"Made by kvdoctor {__version__}; {code('kvdoctor explain ' + finding.code)} says what the finding means.",
    ]
    return "\n".join(lines) + "\n"


def _exit_codes(handover: Handover) -> list[str]:
    script, shown = handover.script, handover.yardstick
    if script.kind == "fails":
        text = f"Exit code 1: {script.calls[-1].title} fails as said. 0: every step runs. 2: something else fails."
        said = shown.text if isinstance(shown, Shown) else ""
        return [text, "", "The model itself said:", "", f"> {markdown(said)}"]
    if script.kind == "differs":
        return [
            "Exit code 1: the logits differ by more than rounding. 0: they do not. The reference is one call with the whole",
            "sequence and no cache.",
        ]
    if script.kind == "refused":
        return ["Exit code 1: the runtime refuses the file. 0: it opens it."]
    return ["Exit code 1: the process that makes the calls dies or hangs. 0: it lives."]


def _origin(handover: Handover, names: dict[str, str]) -> list[str]:
    lines = []
    for file in handover.folder.files:
        if file.name in names:
            facts = file_facts(file, False)
            opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in facts.opsets.items())
            producer = f", by {markdown(facts.producer)}" if facts.producer else ""
            lines.append(
                f"`{names[file.name]}` was {code(file.name)}: IR {facts.ir_version}, opset {markdown(opsets)}{producer}."
            )
    cuts = handover.found.cuts
    if cuts:
        lines.append(f"Left out, since the failure does not need it: {markdown('; '.join(cuts))}.")
    if handover.found.sizes:
        lines.append(
            "Sizes are smaller than those of the original: heads are 8 wide, and the vocabulary has 32 entries."
        )
    return lines


def _kept(handover: Handover, tally: Any) -> list[str]:
    return [
        f"No weights: {tally.replaced} tensors hold noise from a seed ({handover.options.seed}) in the original's element type. "
        f"{tally.kept} constants were kept, since",
        "they decide shapes and control flow: integers and booleans, and floats of up to 8 elements. Names were kept; doc",
        "strings, metadata and producers were dropped.",
    ]


def _mark(handover: Handover, target: Path, names: dict[str, str]) -> str:
    """What programs want to know; the folder is kvdoctor's by this file."""
    finding = handover.finding
    hashes = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in sorted(set(names.values()))}
    document = {
        "schema": SCHEMA,
        "tool": {"name": "kvdoctor", "version": __version__},
        "finding": {"code": finding.code, "name": finding.name, "fingerprint": finding.fingerprint},
        "kind": handover.script.kind,
        "failing": handover.script.calls[-1].title if handover.script.calls else None,
        "node": handover.node or None,
        "environment": handover.report.environment,
        "sha256": hashes,
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"
