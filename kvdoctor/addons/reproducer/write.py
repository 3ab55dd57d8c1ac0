"""Writes a reproducer: the files without weights, a README for the issue tracker, and the program.

The program is a script in Python that needs only onnxruntime and numpy. Names that come from a model are written as
escaped literals, never into code or comments.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor._version import __version__
from kvdoctor.addons.reproducer.messages import CallScript, MadeArray, PriorOutput, make_array
from kvdoctor.addons.reproducer.oracle import Candidate, ScriptOutcome
from kvdoctor.addons.reproducer.weights import ReplacedWeights
from kvdoctor.analysis.model_folder import ModelFolder
from kvdoctor.choices import CPU
from kvdoctor.decode.calls import NUMPY_TYPES
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.diagnose.build_report import file_facts
from kvdoctor.errors import as_argument
from kvdoctor.findings import Finding
from kvdoctor.model.output_folder import REPRO_MARK
from kvdoctor.options import Options
from kvdoctor.records import record
from kvdoctor.report.document import Report, Reproducer
from kvdoctor.report.escaping import code, markdown, printable
from kvdoctor.runtime.providers import ADAPTERS_ADVICE, read_provider

MAX_INLINE = 32
"""Arrays with more numbers are stored in a file next to the program."""

STORE = "inputs.npz"

OTHER_NODE = "the error does not name the node"
"""What the program prints if the step fails in another node: releases of the runtime differ in that."""

HEAD = '''"""{title}

Needs {packages}, and nothing else: {command}
Exit code 1: {one}. 0: {zero}. 2: something else happened.
"""

import os{imports}
import sys
from pathlib import Path


def stop(*error):
    sys.__excepthook__(*error)
    sys.stdout.flush()
    os._exit(2)


sys.excepthook = stop  # any other error must not look like the failure

import numpy as np
import onnxruntime as ort


def show(*things):
    print(*(ascii(str(thing))[1:-1] for thing in things), flush=True)


ort.set_default_logger_severity(4)
show("onnxruntime", ort.__version__, "numpy", np.__version__, "python", sys.version.split()[0])
HERE = Path(__file__).parent
'''
OPEN = """options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.{level}{why}
{provider}
MODELS = {{file: ort.InferenceSession(str(HERE / file), options) for file in {files}}}
"""
BUILT_IN = "options.add_provider({name}, {{}})"
PLUGIN = """# The provider is a plug-in.
os.environ.update({environment})
{library}
ort.register_execution_provider_library("provider", LIBRARY)
DEVICES = [one for one in ort.get_ep_devices() if one.ep_metadata.get("library_path") == LIBRARY]
options.add_provider_for_devices(DEVICES[:1], {{}})"""
NOISE = """

def noise(seed, shape, dtype):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)

"""
STEPS = """
# The feeds of each call; (n, name) is the output of that name from call number n.
CALLS = [
{calls}
]
"""
LOOP = """
returned = []
for title, file, feeds in CALLS:
    feeds = {name: returned[v[0]][v[1]] if isinstance(v, tuple) else v for name, v in feeds.items()}
    show(title, "feeds:", {name: value.shape for name, value in feeds.items()})
"""
FAILS = f"""    try:
        outputs = MODELS[file].run(None, feeds)
    except Exception as error:
        show(title, "fails:", error)
        if title != FAILING:
            sys.exit(2)
        if NODE not in str(error):
            show("{OTHER_NODE}", NODE)
        sys.exit(1)
    returned.append(dict(zip([output.name for output in MODELS[file].get_outputs()], outputs)))
show("not reproduced:", FAILING, "runs")
"""
RUNS = """    outputs = MODELS[file].run(None, feeds)
    returned.append(dict(zip([output.name for output in MODELS[file].get_outputs()], outputs)))
"""
COMPARES = """
# Logits that must be equal: the last `count` positions of a call, and those of the reference from `start` on.
LOGITS, worst = {logits}, 0.0
for call, reference, row, start, count in [
{comparisons}
]:
    got, want = (returned[index][LOGITS[CALLS[index][1]]] for index in (call, reference))
    got, want = (a.reshape(a.shape[0], -1, a.shape[-1]).astype(np.float64) for a in (got, want))
    got, want = got[:, -count:], want[row : row + got.shape[0], start : start + count]
    off = float(np.abs(got - want).max() / want.std(axis=-1).mean())
    show(CALLS[call][0], f"differs from the {{CALLS[reference][0]}} by {{off:.1e}} standard deviations of the logits")
    worst = max(worst, off) if off == off else float("inf")
found = "reproduced" if worst > {tolerance} else "not reproduced"
show(found + ": the largest difference is", f"{{worst:.1e}}", "and the limit is {tolerance:.0e}")
sys.exit(1 if worst > {tolerance} else 0)
"""
DIES = """
# A child process makes the calls, so that this one can report its end.
if "child" not in sys.argv:
    try:
        code = subprocess.run([sys.executable, __file__, "child"], timeout={seconds}).returncode
    except subprocess.TimeoutExpired:
        code = "none: it hangs"
    show("exit code of the process that made the calls:", code)
    sys.exit(1 if code not in (0, 1, 2) else 2 * bool(code))

"""
REFUSED = """options = ort.SessionOptions()
{provider}
try:
    ort.InferenceSession(str(HERE / "model.onnx"), options)
except Exception as error:
    show("refused:", error)
    sys.exit(1)
show("not reproduced: the runtime opens the file")
"""


MEANINGS = {
    "fails": ("the step fails as described", "every step runs"),
    "differs": ("the logits differ by more than rounding", "they do not"),
    "refused": ("the runtime refuses the file", "it opens it"),
    "dies": ("the process that makes the calls crashes or hangs", "it does not"),
}
"""What the exit codes 1 and 0 of the program mean."""


def render_program(contents: "ReproContents", names: dict[str, str]) -> tuple[str, dict[str, "np.ndarray[Any, Any]"]]:
    """The program, and the arrays for `inputs.npz`. `names` are the new names of the files."""
    script, options, stored = contents.script, contents.options, dict[str, np.ndarray[Any, Any]]()
    one, zero = MEANINGS[script.kind]
    title = f"{contents.finding.code} {contents.finding.name}: {_describe_failure(contents)}."
    title = printable(title).replace("\\", "/").replace('"', "'")
    imports = "\nimport subprocess" if script.kind == "dies" else ""
    packages, command = ", ".join(list_packages(options.provider)), run_command(options.provider, "reproduce.py")
    head = HEAD.format(title=title, one=one, zero=zero, imports=imports, packages=packages, command=command)
    parts, provider = [head], _choose_provider(options.provider)
    if script.kind == "refused":
        return "".join([*parts, REFUSED.format(provider=provider)]), stored
    if script.kind == "dies":
        parts.append(DIES.format(seconds=options.limits.timeout))
    levels = {"all": "ORT_ENABLE_ALL", "basic": "ORT_ENABLE_BASIC", "off": "ORT_DISABLE_ALL"}
    level, why = levels[script.level], ""
    if script.kind == "fails" and contents.node:
        level, why = "ORT_DISABLE_ALL", "  # then errors name nodes of the file"
    files = sorted({names[call.file] for call in script.calls})
    parts.append(OPEN.format(level=level, why=why, provider=provider, files=files))
    listed = []
    for call in script.calls:
        feeds = "".join(f"        {name!a}: {_value(value, stored)},\n" for name, value in call.feeds.items())
        listed.append(f"    ({call.title!a}, {names[call.file]!a}, {{\n{feeds}    }})")
    calls = ",\n".join(listed)
    if stored:
        parts.append(f'STORED = np.load(HERE / "{STORE}")\n')
    if "noise(" in calls:
        parts.append(NOISE)
    if script.kind == "fails":
        parts.append(f"FAILING, NODE = {script.calls[-1].title!a}, {contents.node!a}\n")
    parts += [STEPS.format(calls=calls), LOOP, FAILS if script.kind == "fails" else RUNS]
    if script.kind == "differs":
        numbers = ((one.call, one.reference, one.row, one.start, one.count) for one in script.comparisons)
        comparisons = ",\n".join(f"    {one}" for one in numbers)
        logits = ascii({names[call.file]: call.logits for call in script.calls})
        tolerance = TOLERANCES[contents.found.contract.exactness].fails
        parts.append(COMPARES.format(comparisons=comparisons, logits=logits, tolerance=tolerance))
    return "".join(parts), stored


def _choose_provider(asked: str) -> str:
    """The lines that choose the provider; the library of a plug-in is registered."""
    found = read_provider(asked)
    if asked == CPU:
        return "# on the CPU"
    if not found.is_plugin:
        return BUILT_IN.format(name=ascii(found.name))
    known = found.known
    library = f"LIBRARY = {found.library!a}"
    if known is not None and found.library is None:
        library = f"import {known.module}\nLIBRARY = {known.module}.get_library_path()"
    return PLUGIN.format(environment=known.environment if known is not None else {}, library=library)


def list_packages(asked: str) -> list[str]:
    """The packages that the program needs on a provider."""
    known = read_provider(asked).known
    if known is None:
        return ["onnxruntime", "numpy"]
    return [known.package, "numpy"] if known.module is None else ["onnxruntime", "numpy", known.package]


def run_command(asked: str, script: str) -> str:
    """The command of a shell that runs the program on a provider, with the Vulkan driver that it ran on here."""
    variables = read_provider(asked).vulkan_variables
    return " ".join(
        [*(f"{name}={as_argument(value)}" for name, value in variables.items()), "python", as_argument(script)]
    )


def _value(value: "MadeArray | PriorOutput", stored: dict[str, "np.ndarray[Any, Any]"]) -> str:
    if isinstance(value, PriorOutput):
        return f"({value.call}, {value.output!a})"
    kind = np.dtype(NUMPY_TYPES[value.dtype]).name
    if value.seed is not None:
        return f"noise({value.seed}, {value.shape}, {kind!r})"
    if value.numbers is None:
        fill = repr(make_array(replace(value, shape=(1,)))[0].item())
        fill = fill if np.isfinite(value.fill) else f'float("{fill}")'
        return f"np.full({value.shape}, {fill}, {kind!r})"
    array = make_array(value)
    if array.size <= MAX_INLINE and np.isfinite(array).all():
        return f"np.array({array.tolist()}, {kind!r})"
    same = (key for key, other in stored.items() if other.dtype == array.dtype and np.array_equal(other, array))
    key = next(same, f"a{len(stored)}")
    stored[key] = array
    return f"STORED[{key!r}]"


SCHEMA = "kvdoctor/repro/1"


@record(slots=False)
class ReproContents:
    """What a reproducer is written from: the original model with its diagnosis, and the candidate that was found.

    `failing` is the name and the operator of the failing node; empty if it has none.
    """

    finding: Finding
    question: str
    failing: tuple[str, str]
    folder: ModelFolder
    report: Report
    options: Options
    found: Candidate
    failure: ScriptOutcome

    @property
    def script(self) -> CallScript:
        """The script in the sizes of the reproducer."""
        return self.found.script if self.found.script.kind == "differs" else self.found.resized_script()

    @property
    def node(self) -> str:
        """The node that the error must name; empty if it names none."""
        return self.failing[0] if "optimizations only" not in self.failure.pattern else ""


def write_reproducer(target: Path, contents: ReproContents, out: str) -> Reproducer:
    """Write a reproducer into a folder."""
    names = _names(contents)
    tally = contents.found.write(target, contents.options.seed, names)
    text, stored = render_program(contents, names)
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
    main = contents.found.contract.graph("decode").file
    main = main if main in files else files[0]
    others = (f"model_{index}.onnx" if len(files) != 2 else "first_step.onnx" for index in range(len(files)))
    return {file: "model.onnx" if file == main else other for file, other in zip(files, others, strict=True)}


def _describe_failure(contents: ReproContents) -> str:
    script = contents.script
    if script.kind == "refused":
        return "the runtime refuses the file"
    if script.kind == "differs":
        return f"the logits differ ({contents.question})"
    title = script.calls[-1].title.replace("reference run", "a call without a cache")
    if script.kind == "dies":
        return f"{title} crashes the process"
    return f"{title} fails" + (f" in {contents.failing[1]}" if contents.failing[1] else "")


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
        f"No weights: {tally.replaced} tensors contain noise (seed {contents.options.seed}) in the element type of the "
        f"original. {tally.kept} constants are unchanged,",
        "since they decide shapes and control flow: integers and booleans, and floats of up to 8 elements. Names are",
        "unchanged; doc strings, metadata and producers were removed.",
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
    one, zero = MEANINGS[contents.script.kind]
    text = f"Exit code 1: {one}. 0: {zero}. 2: something else happened."
    if contents.script.kind != "fails":
        return [text]
    return [text, "", "The error of the original model:", "", f"> {markdown(contents.failure.text)}"]


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
