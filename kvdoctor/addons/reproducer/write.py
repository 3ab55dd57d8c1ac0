"""Writes a reproducer: the files without weights, the program, and a README for the issue tracker."""

import hashlib
import json
from pathlib import Path

import numpy as np

from kvdoctor._version import __version__
from kvdoctor.addons.reproducer.messages import CallScript
from kvdoctor.addons.reproducer.oracle import Candidate, OutcomeDifference, ScriptOutcome
from kvdoctor.addons.reproducer.program import STORE, ProgramText, list_packages, render_program, run_command
from kvdoctor.addons.reproducer.weights import ReplacedWeights
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.diagnose.build_report import file_facts
from kvdoctor.findings import Finding
from kvdoctor.model.output_folder import REPRO_MARK
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.document import Report, Reproducer
from kvdoctor.report.escaping import code, markdown
from kvdoctor.runtime.providers import ADAPTERS_ADVICE, read_provider

SCHEMA = "kvdoctor/repro/1"


@record(slots=False)
class ReproContents:
    """The content of a reproducer: the finding, the original model and its diagnosis, the smallest candidate.

    `question` is that of the experiment, `failing` the name and the operator of the failing node, empty if it has none.
    """

    finding: Finding
    question: str
    failing: tuple[str, str]
    folder: ModelFolder
    report: Report
    options: Options
    found: Candidate
    failure: "ScriptOutcome | OutcomeDifference"

    @property
    def script(self) -> CallScript:
        """The script in the sizes of the reproducer."""
        return self.found.script if self.found.script.kind == "differs" else self.found.resized_script()

    @property
    def node(self) -> str:
        """The node that the error must name; empty if it names none."""
        failure = self.failure
        named = isinstance(failure, ScriptOutcome) and "optimizations only" not in failure.pattern
        return self.failing[0] if named else ""


def write_reproducer(target: Path, contents: ReproContents, out: str) -> Reproducer:
    """Write a reproducer into a folder."""
    names = _names(contents)
    tally = contents.found.write(target, contents.options.seed, names)
    text, stored = render_program(contents.script, _program_text(contents), names)
    (target / "reproduce.py").write_text(text, encoding="utf-8", newline="\n")
    if stored:
        np.savez(target / STORE, **stored)  # type: ignore[arg-type]
    files = {path.name: path.stat().st_size for path in sorted(target.iterdir())}
    (target / "README.md").write_text(_readme(contents, names, tally, files), encoding="utf-8", newline="\n")
    (target / REPRO_MARK).write_text(_mark(contents, target, names), encoding="utf-8", newline="\n")
    return Reproducer(
        out=out,
        reason=None,
        command=run_command(contents.options.provider, f"{out}/reproduce.py"),
        finding=contents.finding.fingerprint,
        shows=_describe_failure(contents),
        files=tuple(sorted(path.name for path in target.iterdir())),
        bytes=sum(path.stat().st_size for path in target.iterdir()),
        left_out=contents.found.cuts,
    )


def _names(contents: ReproContents) -> dict[str, str]:
    """The new names of the files: the decoder is `model.onnx`."""
    script = contents.script
    files = list(dict.fromkeys([*script.files, *(call.file for call in reversed(script.calls))]))
    names = {file: f"model_{index}.onnx" for index, file in enumerate(files)}
    main = contents.found.contract.graph("decode").file
    names |= {main: "model.onnx"} if main in names else {files[0]: "model.onnx"}
    return {
        file: "first_step.onnx" if name.startswith("model_") and len(files) == 2 else name
        for file, name in names.items()
    }


def _describe_failure(contents: ReproContents) -> str:
    """The failure as a short text, without names."""
    script = contents.script
    if script.kind == "refused":
        return "the runtime refuses the file"
    if script.kind == "differs":
        return f"the logits differ ({contents.question})"
    title = script.calls[-1].title.replace("reference run", "a call without a cache")
    if script.kind == "dies":
        return f"{title} crashes the process"
    return f"{title} fails" + (f" in {contents.failing[1]}" if contents.failing[1] else "")


def _program_text(contents: ReproContents) -> ProgramText:
    finding, script = contents.finding, contents.script
    return ProgramText(
        title=f"{finding.code} {finding.name}: {_describe_failure(contents)}.",
        failing=script.calls[-1].title if script.calls else "",
        node=contents.node,
        provider=contents.options.provider,
        exactness=contents.found.contract.exactness,
        seconds=contents.options.limits.timeout,
    )


def _readme(contents: ReproContents, names: dict[str, str], tally: ReplacedWeights, files: dict[str, int]) -> str:
    finding, report = contents.finding, contents.report
    node = f", {code(contents.failing[0])}" if contents.failing[0] else ""
    versions = ", ".join(f"{name} {version}" for name, version in report.environment.items())
    lines = [
        f"# {finding.code} {finding.name}: {_describe_failure(contents)}",
        "",
        f"{markdown(finding.cause)}",
        "",
        f"- what fails: {_describe_failure(contents)}{node}",
        f"- location: {markdown(finding.where)}",
        f"- expected: {markdown(finding.declared)}",
        f"- observed: {markdown(finding.observed)}",
        *(f"- effect: {markdown(text)}" for text in finding.effects),
        f"- observed with: {markdown(versions)}",
        "",
        "## Run it",
        "",
        "```sh",
        f"pip install {' '.join(list_packages(contents.options.provider))}",
        run_command(contents.options.provider, "reproduce.py"),
        "```",
        *_drivers(contents),
        "",
        *_exit_codes(contents),
        "",
        "## What is in it",
        "",
        *(f"- `{name}`: {size:,} bytes" for name, size in files.items()),
        "",
        *_origin(contents, names),
        "",
        *_describe_tensors(contents, tally),
        "",
        f"Made by kvdoctor {__version__}; {code('kvdoctor explain ' + finding.code)} describes the finding.",
    ]
    return "\n".join(lines) + "\n"


def _drivers(contents: ReproContents) -> list[str]:
    """What somebody else needs besides packages, for a provider that may run on Vulkan."""
    if not read_provider(contents.options.provider).uses_vulkan:
        return []
    text = "With a GPU no variable is needed. The variables name a Vulkan driver by its manifest, here a software one:"
    return ["", f"{text} {markdown(ADAPTERS_ADVICE)}."]


def _exit_codes(contents: ReproContents) -> list[str]:
    script, failure = contents.script, contents.failure
    if script.kind == "fails":
        text = f"Exit code 1: {script.calls[-1].title} fails as described. 0: every step runs. 2: something else fails."
        error = failure.text if isinstance(failure, ScriptOutcome) else ""
        return [text, "", "The error of the original model:", "", f"> {markdown(error)}"]
    if script.kind == "differs":
        return ["Exit code 1: the logits differ by more than rounding. 0: they do not."]
    if script.kind == "refused":
        return ["Exit code 1: the runtime refuses the file. 0: it opens it."]
    return ["Exit code 1: the process that makes the calls crashes or hangs. 0: it does not."]


def _origin(contents: ReproContents, names: dict[str, str]) -> list[str]:
    lines = []
    for file in contents.folder.files:
        if file.name in names:
            facts = file_facts(file, False)
            opsets = ", ".join(f"{domain or 'ai.onnx'} {version}" for domain, version in facts.opsets.items())
            producer = f", by {markdown(facts.producer)}" if facts.producer else ""
            versions = f"IR {facts.ir_version}, opset {markdown(opsets)}{producer}"
            lines.append(f"`{names[file.name]}` was {code(file.name)}: {versions}.")
    cuts = contents.found.cuts
    if cuts:
        lines.append(f"Removed, since the failure does not depend on it: {markdown('; '.join(cuts))}.")
    if contents.found.sizes:
        lines.append("Sizes are smaller than in the original: heads have width 8, and the vocabulary has 32 entries.")
    return lines


def _describe_tensors(contents: ReproContents, tally: ReplacedWeights) -> list[str]:
    return [
        f"No weights: {tally.replaced} tensors contain noise (seed {contents.options.seed}) in the element type of the "
        f"original. {tally.kept} constants are unchanged,",
        "since they decide shapes and control flow: integers and booleans, and floats of up to 8 elements. Names are",
        "unchanged; doc strings, metadata and producers were removed.",
    ]


def _mark(contents: ReproContents, target: Path, names: dict[str, str]) -> str:
    """The content of `reproducer.json`, which also marks the folder as written by kvdoctor."""
    finding = contents.finding
    hashes = {name: hashlib.sha256((target / name).read_bytes()).hexdigest() for name in sorted(set(names.values()))}
    document = {
        "schema": SCHEMA,
        "tool": {"name": "kvdoctor", "version": __version__},
        "finding": {"code": finding.code, "name": finding.name, "fingerprint": finding.fingerprint},
        "kind": contents.script.kind,
        "failing": contents.script.calls[-1].title if contents.script.calls else None,
        "node": contents.node or None,
        "environment": contents.report.environment,
        "sha256": hashes,
    }
    return json.dumps(document, indent=2, ensure_ascii=True) + "\n"
