"""Writes docs/devices.md from devices.json, the documented limits of devices: `python docs/make_devices.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("devices.json")
ABOUT = {
    "empty-past": "empty past",
    "dynamic-axes": "dynamic axes",
    "if": "If",
    "branch-shapes": "branches of other shapes",
    "int64": "int64",
    "float64": "double",
    "attention-past": "Attention with past",
    "growing-gqa": "growing GroupQueryAttention",
    "operators": "operators",
}
EFFECTS = {"fails": "fails", "left-out": "not on the device"}
HEAD = """# Devices: what was measured, and what is documented

## Measured

Releases of onnxruntime on the CPU: [targets](targets.md). Of devices, the kernels of WebGPU, on software adapters that
need no GPU: [by kernel and model](https://github.com/kvdoctor/kvdoctor/blob/main/evidence/providers.md), with releases
and date. `kvdoctor step-test MODEL --provider webgpu` does the same for your model:
[CI](ci.md#on-webgpu-without-a-gpu).

The [page of a written program](consumers.md#in-a-browser-and-on-a-phone), with `webgpu` of onnxruntime-web 1.30.0 in
Chromium 156 on SwiftShader, on 2026-11-26:

| export | its runs | kernels | judged by `step-test --trace` |
| --- | --- | --- | --- |
| `llama-gqa` | as expected | 6,200 | a key is 0.0003 standard deviations off, no token changes (KV420, a warning) |
| `gpt2`, `marian-4.57.6`, `t5`, `whisper` | as expected | 3,800 to 5,744 | the same as here |

A software adapter shows whether kernels are right, and not what the driver of a GPU makes of them: there a
[trace](trace.md) decides.

## Documented by others

What execution providers for devices are documented to refuse of a decoder. **Nothing of this table was measured**: its
entries quote documents and issues of other projects, so they are never findings. *Not on the device* means that another
provider takes the nodes over, with a copy each way.

Made from `docs/devices.json` by `python docs/make_devices.py`; an entry needs its address.

| device | what the graph has | effect | what the source says | as of | sources |
| --- | --- | --- | --- | --- | --- |
"""


def limits() -> Iterator[dict[str, Any]]:
    """Every entry of the table, with its device."""
    for entry in json.loads(TABLE.read_text(encoding="utf-8")):
        for limit in entry["limits"]:
            yield {"device": entry["device"], **limit}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, limits()))


def row(limit: dict[str, Any]) -> str:
    """One entry; its list of operators is in the sources and in devices.json."""
    listed = (limit.get("supported") or limit.get("unsupported") or "").split()
    text = limit["words"] + (f" ({len(listed)} are listed)" if listed else "")
    sources = ", ".join(f"[{_name(url)}]({url})" for url in limit["sources"])
    about, effect = ABOUT[limit["when"]], EFFECTS[limit["effect"]]
    return f"| {limit['device']} | {about} | {effect} | {text} | {limit['as_of']} | {sources} |\n"


def _name(url: str) -> str:
    """`onnxruntime #22066` of an issue or pull request, else the last part of the path."""
    parts = url.removeprefix("https://").rstrip("/").split("/")
    return f"{parts[2]} #{parts[4]}" if parts[3:4] in (["issues"], ["pull"]) else parts[-1]


if __name__ == "__main__":
    Path(__file__).with_name("devices.md").write_text(page(), encoding="utf-8")
