"""Writes a script as a Python program that needs only onnxruntime and numpy.

Names that come from a model are written as escaped literals, never into code or comments.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.addons.reproducer.messages import CallScript, Comparison, MadeArray, PriorOutput, make_array
from kvdoctor.choices import CPU
from kvdoctor.decode.calls import NUMPY_TYPES
from kvdoctor.decode.tolerances import TOLERANCES
from kvdoctor.errors import as_argument
from kvdoctor.records import record
from kvdoctor.report.escaping import printable
from kvdoctor.runtime.providers import read_provider

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


@record
class ProgramText:
    """The texts and limits of the program. `node`, if not empty, must occur in the error message."""

    title: str
    failing: str
    node: str
    provider: str
    exactness: str
    seconds: float


def render_program(
    script: CallScript, texts: ProgramText, names: dict[str, str]
) -> tuple[str, dict[str, "np.ndarray[Any, Any]"]]:
    """The program, and the arrays for `inputs.npz`. `names` are the new names of the files."""
    stored: dict[str, np.ndarray[Any, Any]] = {}
    parts = [_head(script, texts)]
    if script.kind == "refused":
        return "".join([*parts, REFUSED.format(provider=_choose_provider(texts.provider))]), stored
    if script.kind == "dies":
        parts.append(DIES.format(seconds=texts.seconds))
    parts.append(_opening(script, texts, names))
    calls = ",\n".join(_call(call, names, stored) for call in script.calls)
    if stored:
        parts.append(f'STORED = np.load(HERE / "{STORE}")\n')
    if "noise(" in calls:
        parts.append(NOISE)
    if script.kind == "fails":
        parts.append(f"FAILING, NODE = {texts.failing!a}, {texts.node!a}\n")
    parts += [STEPS.format(calls=calls), LOOP, FAILS if script.kind == "fails" else RUNS]
    if script.kind == "differs":
        comparisons = ",\n".join(f"    {_comparison(comparison)}" for comparison in script.comparisons)
        logits = ascii({names[call.file]: call.logits for call in script.calls})
        tolerance = TOLERANCES[texts.exactness].fails
        parts.append(COMPARES.format(comparisons=comparisons, logits=logits, tolerance=tolerance))
    return "".join(parts), stored


def _head(script: CallScript, texts: ProgramText) -> str:
    meanings = {
        "fails": ("the step fails as described", "every step runs"),
        "differs": ("the logits differ", "they do not differ"),
        "refused": ("the runtime refuses the file", "it opens it"),
        "dies": ("the process that runs the model crashes", "it does not crash"),
    }
    one, zero = meanings[script.kind]
    imports = "\nimport subprocess" if script.kind == "dies" else ""
    title = printable(texts.title).replace("\\", "/").replace('"', "'")
    packages, command = ", ".join(list_packages(texts.provider)), run_command(texts.provider, "reproduce.py")
    return HEAD.format(title=title, one=one, zero=zero, imports=imports, packages=packages, command=command)


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


def _opening(script: CallScript, texts: ProgramText, names: dict[str, str]) -> str:
    level, why = {"all": "ORT_ENABLE_ALL", "basic": "ORT_ENABLE_BASIC", "off": "ORT_DISABLE_ALL"}[script.level], ""
    if script.kind == "fails" and texts.node:
        level, why = "ORT_DISABLE_ALL", "  # then errors name nodes of the file"
    files = sorted({names[call.file] for call in script.calls})
    return OPEN.format(level=level, why=why, provider=_choose_provider(texts.provider), files=files)


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


def _call(call: Any, names: dict[str, str], stored: dict[str, "np.ndarray[Any, Any]"]) -> str:
    feeds = "".join(f"        {name!a}: {_value(value, stored)},\n" for name, value in call.feeds.items())
    return f"    ({call.title!a}, {names[call.file]!a}, {{\n{feeds}    }})"


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
    known = next(
        (key for key, other in stored.items() if other.dtype == array.dtype and np.array_equal(other, array)), None
    )
    key = known or f"a{len(stored)}"
    stored[key] = array
    return f"STORED[{key!r}]"


def _comparison(comparison: Comparison) -> str:
    numbers = (comparison.call, comparison.reference, comparison.row, comparison.start, comparison.count)
    return str(numbers)
