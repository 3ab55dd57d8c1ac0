"""Measures what each release of onnxruntime takes: `python docs/make_limits.py`.

For every release that has wheels for a Python installed here an isolated environment is made, and small models are
opened in it: one for each IR version and each opset, each standard operator at each opset that changed it, and the
operators of other domains that decoders use (docs/limit_models.py). Writes kvdoctor/runtime/targets/limits.json and
docs/targets.md. Takes minutes.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from limit_models import write_all

from kvdoctor.runtime.environments import EnvironmentUnavailable, find_uv
from kvdoctor.runtime.release_environments import prepare_environment
from kvdoctor.runtime.targets import BINDINGS, Binding
from kvdoctor.runtime.targets.limits import FILE, meanings, operator_of

RELEASES = (
    *("1.15.1", "1.16.0", "1.16.3", "1.17.0", "1.17.3", "1.18.1", "1.19.2", "1.20.1", "1.21.1", "1.22.0", "1.22.1"),
    *("1.23.2", "1.24.4", "1.25.1", "1.26.0", "1.27.0", "1.28.0", "1.29.0", "1.30.0", "1.31.1", "1.32.0"),
)
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
"""What kvdoctor itself can run in."""
PAGE = Path(__file__).with_name("targets.md")

# Runs in the environment of the release. Every model is announced before it is opened: one that ends the process is
# none that the release takes.
OPEN = """
import json, sys
import onnxruntime as ort
ort.disable_telemetry_events()
folder, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(first, last):
    print(json.dumps([number, None]), flush=True)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        ort.InferenceSession(f"{folder}/{number}.onnx", options, providers=["CPUExecutionProvider"])
    except Exception:
        print(json.dumps([number, False]), flush=True)
    else:
        print(json.dumps([number, True]), flush=True)
"""


def opened(release: str, folder: Path, count: int) -> list[bool]:
    """Which of the models a release opens; the process is started again after one that ends it."""
    python = prepare_environment(release, offline=False)
    found = [False] * count
    first = 0
    while first < count:
        command = [str(python), "-I", "-c", OPEN, str(folder), str(first), str(count)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        if not lines:
            raise SystemExit(f"onnxruntime {release} does not start: {done.stderr[-400:]}")
        for number, answer in lines:
            found[number] = bool(answer)
        first = lines[-1][0] + 1
    return found


def pythons(release: str) -> list[str]:
    """The versions of Python that a release has wheels for on this platform."""
    uv = find_uv()
    if uv is None:
        raise SystemExit("this needs uv")
    with tempfile.TemporaryDirectory() as target:
        fitting = []
        for version in PYTHONS:
            command = [uv, "pip", "install", "--quiet", "--dry-run", "--no-deps", "--only-binary", ":all:"]
            command += ["--python-version", version, "--target", target, f"onnxruntime=={release}"]
            if subprocess.run(command, check=False, capture_output=True).returncode == 0:
                fitting.append(version)
    return fitting


def measured(release: str, names: list[str], folder: Path) -> dict[str, Any]:
    """The facts of one release; `opens` are the names of the features it takes."""
    answers = opened(release, folder, len(names))
    takes = {name for name, answer in zip(names, answers, strict=True) if answer}
    return {
        "ir": _largest(takes, "ir/"),
        "opset": _largest(takes, "opset/"),
        "pythons": pythons(release),
        "opens": {feature for name in takes if (feature := _feature(name)) is not None},
    }


def _largest(takes: set[str], prefix: str) -> int:
    return max(int(name.removeprefix(prefix)) for name in takes if name.startswith(prefix))


def _feature(name: str) -> str | None:
    """The feature that a model shows, as kvdoctor.runtime.targets.limits names it."""
    kind, _, rest = name.partition("/")
    if kind == "standard":
        return rest.partition("/")[0]
    if kind == "contrib":
        operator, _, attribute = rest.partition("/")
        return f"{operator}.{attribute}" if attribute else operator
    return None


def table(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The data file. What no release opens says nothing of any of them and is left out."""
    known = sorted(set().union(*(facts["opens"] for facts in found.values())))
    operators: dict[str, list[int]] = {}
    contrib: dict[str, list[str]] = {}
    for feature in known:
        domain, _, name = feature.rpartition(":")
        if domain:
            operator, _, attribute = name.partition(".")
            contrib.setdefault(f"{domain}:{operator}", []).extend([attribute] if attribute else [])
        else:
            operator, _, since = name.rpartition("-")
            operators[operator] = sorted((*operators.get(operator, ()), int(since)))
    rows = {}
    for release, facts in found.items():
        absent = [feature for feature in known if feature not in facts["opens"]]
        unsupported = [feature for feature in absent if ":" in feature or _since(feature) <= facts["opset"]]
        rows[release] = {
            "ir": facts["ir"],
            "opset": facts["opset"],
            "pythons": facts["pythons"],
            "unsupported": unsupported,
        }
    return {"operators": operators, "contrib": contrib, "releases": rows}


def _since(feature: str) -> int:
    return int(feature.rpartition("-")[2])


def page(data: dict[str, Any]) -> str:
    """docs/targets.md."""
    rows: list[list[str]] = []
    for release, facts in data["releases"].items():
        whole = [name for name in data["contrib"] if name in facts["unsupported"]]
        attributes = [f for f in facts["unsupported"] if ":" in f and f not in whole and operator_of(f) not in whole]
        standard = [name for name in facts["unsupported"] if ":" not in name]
        cells = [str(facts["ir"]), str(facts["opset"]), ", ".join(facts["pythons"]), _count(standard)]
        cells += [_short(whole), str(len(attributes) or "none")]
        if rows and rows[-1][1:] == cells:
            rows[-1][0] += f", {release}"
        else:
            rows.append([release, *cells])
    header = ["onnxruntime", "IR", "opset", "Python", "standard operators", "missing operators", "missing attributes"]
    numbered = ", ".join(binding.name for binding in BINDINGS if binding.follows_runtime)
    shipped = [
        [binding.name, _shipped(binding), binding.source, _faults(binding)]
        for binding in BINDINGS
        if not binding.follows_runtime
    ]
    changes = [
        [f"`{one.operator}`", one.last, one.before, one.since, f"[{one.after}]({one.source})"] for one in meanings()
    ]
    lines = [HEAD, *_markdown(header, rows), CHANGES, *_markdown(["operator", "up to", "", "from", ""], changes)]
    lines += [MIDDLE.format(numbered), *_markdown(["target", "releases", "from", "cannot"], shipped), ""]
    return "\n".join(lines)


def _short(features: list[str]) -> str:
    return ", ".join(f"`{feature.rpartition(':')[2]}`" for feature in features) or "none"


def _count(features: list[str]) -> str:
    if len(features) <= 3:
        return "all" if not features else "all but " + ", ".join(f"`{feature}`" for feature in features)
    return f"all but {len(features)}"


def _shipped(binding: Binding) -> str:
    return ", ".join(f"{release}: {runtime}" for release, runtime in binding.ships.items())


def _faults(binding: Binding) -> str:
    return "; ".join(f"up to {releases[-1]}: {hazard.words}" for hazard, releases in binding.hazards) or ""


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


HEAD = """# Targets: what each onnxruntime supports

`--target onnxruntime==1.16.3` checks a model for that release: by the table below, and by decode steps that run with it
in an isolated environment. `step-test`, `gate` and `re-export` run it, `inspect` only reads the table. The option may
be repeated, and may name a binding instead of the runtime:

```sh
kvdoctor step-test MODEL --target onnxruntime==1.16.3 --target ort-crate==2.0.0-rc.10
kvdoctor re-export MODEL -o FIXED --target onnxruntime==1.16.3
kvdoctor convert MODEL -o FIXED --ir-version 9 --opset 17
```

Without a target, `kvdoctor inspect MODEL` says which release the files need on the CPU and for what, by the same table:
`needs onnxruntime 1.23.2 (com.microsoft GroupQueryAttention with 12 inputs)`.

A model whose IR version or opset is too new for a target is lowered by `re-export`: no node may change its meaning, and
what prevents that is named, with the export that would solve it. `--opset N` and `--ir-version N` also raise, for a
tool that asks for a newer opset. The copy is diagnosed and its logits are compared with the original's, as after every
repair. No weight is read.

The environments contain only onnxruntime and numpy. uv makes them, the first time over the network, in the user's cache
folder (`~/.cache/kvdoctor/onnxruntime` on Linux); `--offline` never downloads one. Where no installed Python has wheels
of the release, the target is *not checked*, with the command that would change that, and the model is not called
healthy.

## Execution providers

`--provider webgpu` runs the same calls on the CPU and on that provider, in a process of its own, and compares the two.
It takes `webgpu`, `openvino`, `qnn` and `ggml` (plug-ins), whatever the installed onnxruntime has, and the path of a
provider's library; it may be repeated. `kvdoctor env` lists what is here, and the command that brings the rest.

```sh
pip install 'kvdoctor[webgpu]'
apt-get install chromium-common   # SwiftShader, a Vulkan without a GPU
kvdoctor step-test MODEL --provider webgpu
apt-get install -t bookworm-backports mesa-vulkan-drivers   # lavapipe, a second one: Mesa 25 and newer
kvdoctor step-test MODEL --provider webgpu@swiftshader --provider webgpu@lavapipe
```

`@NAME` chooses a Vulkan driver, by the name that `env` gives it or by its `.json` file; without it `VK_DRIVER_FILES` or
the loader does. Each use has an outcome on each side. Where a provider departs from the CPU, the first step and the
operator that differs alone, on the CPU's inputs, are named; a crash is halved to its node, and `repro` writes that.

How far logits may be off is measured on the model: four times the median difference of first calls, which have no
cache, at least kvdoctor's own limit and at most ten times that. What one software adapter alone shows is *suspected*;
a second adapter or a device confirms it. A provider that leaves every node to the CPU is *not checked*. Where a
sequence ends earlier than on the CPU, that is a difference as well.

## Measured

Made by `python docs/make_limits.py`, which opens small models in every release on the CPU: nothing here is copied from
a document. The last three columns are about the operators and attributes that some measured release takes; operators
count at the opset that last changed them, and `kvdoctor/runtime/targets/limits.json` names the attributes.
"""

CHANGES = """
For a patch release that is not in the table, only what holds for all measured patches of its minor version is reported:
some added operators. A release beyond the table is run, and only what the run shows is reported; its largest IR version
and opset are then asked of itself, with such small models.

## Changed meanings

Operators that compute something else on the CPU from some release on, with the same inputs and attributes: the first
two columns are the newest measured release with the old meaning, the next two the oldest with the new one
(`kvdoctor/runtime/targets/meanings.json`; a test runs each on both sides). A finding of `--target` names the rows that
lie between the two runtimes. `inspect --target` warns without a run (KV406) where the old meaning is wrong for every
decoder: a window, `softcap` with a mask, `nonpad_kv_seqlen`.
"""

MIDDLE = """
## Bindings

Numbered as the onnxruntime that they hold: {}. The others:
"""


def main() -> None:
    """Measure, and write the two files."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        names = write_all(Path(scratch))
        for release in RELEASES:
            try:
                found[release] = measured(release, names, Path(scratch))
            except EnvironmentUnavailable as reason:
                print(f"{release}: left out: {reason}", file=sys.stderr)
                continue
            facts = found[release]
            print(release, "IR", facts["ir"], "opset", facts["opset"], len(facts["opens"]), "features", file=sys.stderr)
    data = table(found)
    FILE.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")


if __name__ == "__main__":
    main()
