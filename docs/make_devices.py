"""Writes docs/devices.md from the table of documented limits of devices: `python docs/make_devices.py`."""

from pathlib import Path

from kvdoctor.diagnose.devices import DocumentedLimit, list_limits
from kvdoctor.report.wording.devices import ABOUT, EFFECTS

HEAD = """# Documented limits of devices

What execution providers for devices are documented to refuse of a decoder. `kvdoctor inspect` names those that a model
touches in one line, with `-v` each with what it concerns and its source, and as `stacks[].devices` in
[JSON](formats.md). **Nothing of it was measured**: kvdoctor runs models on the CPU, and these entries quote documents
and issues of other projects. So they are never findings, and change no exit code. Releases of onnxruntime on the CPU
are measured instead: [targets](targets.md). *Not on the device* means that another provider takes the nodes over, with
a copy each way.

Made from `kvdoctor/diagnose/devices.json` by `python docs/make_devices.py`; an entry needs its address.

| device | what the graph has | effect | what the source says | as of | sources |
| --- | --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, list_limits()))


def row(limit: DocumentedLimit) -> str:
    """One entry, with its list of operators folded into the sentence."""
    listed = limit.supported or limit.unsupported
    words = limit.words + (f": {', '.join(f'`{name}`' for name in sorted(listed))}" if listed else "")
    sources = ", ".join(f"[{_name(url)}]({url})" for url in limit.sources)
    return f"| {limit.device} | {ABOUT[limit.when]} | {EFFECTS[limit.effect]} | {words} | {limit.as_of} | {sources} |\n"


def _name(url: str) -> str:
    """`onnxruntime #22066` of an issue or pull request, else the last part of the path."""
    parts = url.removeprefix("https://").rstrip("/").split("/")
    return f"{parts[2]} #{parts[4]}" if parts[3:4] in (["issues"], ["pull"]) else parts[-1]


if __name__ == "__main__":
    Path(__file__).with_name("devices.md").write_text(page(), encoding="utf-8")
