"""Writes evidence/providers.md: `python -m evidence.providers.make_page [EXPORTS] --provider webgpu@swiftshader`.

EXPORTS is the folder in which `evidence.zoo.make_page --exports` keeps its exports; the fixtures come first. A model
whose step-test takes longer than `--most` seconds is listed as not finished.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "evidence" / "providers.md"
HEAD = """# Exports on WebGPU

What `kvdoctor step-test --consumer held --provider PROVIDER` says of small exports, with onnxruntime {onnxruntime} and
version {plugin} of the plug-in, on {adapter}, on {day}. *tolerance* is what was measured on the model: how far
logits may be from those of the CPU, in their standard deviations. *uses* that passed there, of those that passed on
the CPU.

Made by `python -m evidence.providers.make_page`. It says nothing of a real device.

| export | stack | verdict | uses | tolerance | what departs from the CPU |
| --- | --- | --- | --- | --- | --- |
"""


def rows(name: str, report: dict[str, Any]) -> Iterator[str]:
    """A row for each stack of a report."""
    target = report["targets"][0] if report["targets"] else {"not_run": {}, "tolerance": {}, "provider": ""}
    for stack in (one["name"] for one in report["stacks"]):
        runs = [run for run in report["runs"] if run["stack"] == stack]
        elsewhere = [run for run in runs if run["provider"] == target["provider"]]
        here = {run["experiment"] for run in runs if run not in elsewhere and run["outcome"] == "passed"}
        there = {run["experiment"] for run in elsewhere}
        passed = {run["experiment"] for run in elsewhere if run["outcome"] == "passed"}
        found = [f for f in report["findings"] if f["stack"] == stack and f["code"] in ("KV404", "KV405")]
        texts = [f"{f['severity']}: {f['where'].partition(', under')[0]}: {f['observed']}" for f in found]
        texts += [target["not_run"][stack]] if stack in target["not_run"] else []
        tolerance = target["tolerance"].get(stack, "")
        uses = f"{len(passed & here)} of {len(there & here)}"
        yield f"| {name} | {stack} | {report['verdict']} | {uses} | {tolerance} | {'; '.join(texts) or 'nothing'} |\n"


def run(folder: Path, provider: str, most: float) -> dict[str, Any] | None:
    """The report on a model; None where it is not finished in time."""
    command = (sys.executable, "-m", "kvdoctor", "step-test", folder, "--consumer", "held", "--provider", provider)
    try:
        done = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, timeout=most, check=False)
    except subprocess.TimeoutExpired:
        return None
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def main() -> None:
    """Run every export, and write the page after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("exports", type=Path, nargs="?")
    parser.add_argument("--provider", default="webgpu")
    parser.add_argument("--most", type=float, default=600)
    given = parser.parse_args()
    folders = [one for one in sorted((ROOT / "fixtures" / "exports").iterdir()) if one.is_dir()]
    if given.exports is not None:
        folders += sorted(one.parent for one in given.exports.glob("*/*/config.json"))
    table, head = "", ""
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        report = run(folder, given.provider, given.most)
        if report is None:
            table += f"| {name} | | not finished in {given.most:g} s | | | |\n"
            continue
        adapters = [one["adapter"] for one in report["targets"] if one["adapter"]]
        if not head and adapters:
            from importlib.metadata import version

            plugin, release = version("onnxruntime-ep-webgpu"), report["environment"]["onnxruntime"]
            head = HEAD.format(adapter=adapters[0], onnxruntime=release, plugin=plugin, day=datetime.now(UTC).date())
        table += "".join(rows(name, report))
        PAGE.write_text(head + table, encoding="utf-8")


if __name__ == "__main__":
    main()
