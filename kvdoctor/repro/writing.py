"""What is handed over: the files without weights, the program, and a README for the issue tracker."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

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
from kvdoctor.repro.weights import Tally
from kvdoctor.repro.witness import Difference, Shown
from kvdoctor.script import Script

SCHEMA = "kvdoctor/repro/1"


@dataclass(frozen=True)
class Handover:
    """All that is known when a reproducer is written. `place` is the failing node, its name and operator."""

    finding: Finding
    question: str
    place: tuple[str, str]
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
        return self.place[0] if isinstance(shown, Shown) and "optimisations only" not in shown.words else ""


def write(target: Path, handover: Handover, out: str) -> Reproducer:
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
        out=out,
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
    script = handover.script
    if script.kind == "refused":
        return "the runtime refuses the file"
    if script.kind == "differs":
        return f"the logits differ ({handover.question})"
    title = script.calls[-1].title.replace("reference run", "a call without a cache")
    if script.kind == "dies":
        return f"{title} takes the process with it"
    return f"{title} fails" + (f" in {handover.place[1]}" if handover.place[1] else "")


def _wording(handover: Handover) -> Wording:
    finding, script = handover.finding, handover.script
    return Wording(
        title=f"{finding.code} {finding.name}: {_what(handover)}.",
        failing=script.calls[-1].title if script.calls else "",
        node=handover.node,
        provider=handover.options.provider,
        exactness=handover.found.contract.exactness,
        seconds=handover.options.limits.timeout,
    )


def _readme(handover: Handover, names: dict[str, str], tally: Tally, files: dict[str, int]) -> str:
    finding, report = handover.finding, handover.report
    node = f", {code(handover.place[0])}" if handover.place[0] else ""
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
            "Exit code 1: the logits differ by more than rounding. 0: they do not.",
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
            made = f"IR {facts.ir_version}, opset {markdown(opsets)}{producer}"
            lines.append(f"`{names[file.name]}` was {code(file.name)}: {made}.")
    cuts = handover.found.cuts
    if cuts:
        lines.append(f"Left out, since the failure does not need it: {markdown('; '.join(cuts))}.")
    if handover.found.sizes:
        lines.append(
            "Sizes are smaller than those of the original: heads are 8 wide, and the vocabulary has 32 entries."
        )
    return lines


def _kept(handover: Handover, tally: Tally) -> list[str]:
    return [
        f"No weights: {tally.replaced} tensors hold noise (seed {handover.options.seed}) in the element type of the "
        f"original. {tally.kept} constants were kept,",
        "since they decide shapes and control flow: integers and booleans, and floats of up to 8 elements. Names were",
        "kept; doc strings, metadata and producers were dropped.",
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
