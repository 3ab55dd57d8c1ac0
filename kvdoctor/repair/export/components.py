"""The components that kvdoctor uses: what is installed, and the command that installs or repairs the rest."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from kvdoctor._version import __version__
from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.repair.export.exporters.registry import load
from kvdoctor.runtime.environments import Requirements, find_uv, transformers_for

NEEDED = ("onnx", "onnxruntime", "numpy", "click", "rich", "psutil", "msgspec")


def describe_components() -> Iterator[str]:
    """Yield one line for each component: its state, name and version, and the command that installs it."""
    yield f"kvdoctor {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    missing = []
    for name in NEEDED:
        try:
            yield f"ok       {name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            missing.append(name)
            yield f"MISSING  {name}: pip install {name}"
    yield _providers(missing)
    if find_uv() is not None:
        yield "ok       uv: makes isolated environments for other versions of onnxruntime and for exporters"
    else:
        yield "absent   uv, for other versions of onnxruntime and for exporters: pip install uv"
    yield _source("checkpoints for --reference", transformers_for({}))
    yield from (_source(f"exporter {exporter.name}", exporter.needs) for exporter in load())
    yield "limits   time per answer, and resident memory of the worker (sampled every 20 ms)"


def _source(purpose: str, needs: Requirements) -> str:
    """Return where the packages for a purpose come from: this Python, or an environment that uv makes."""
    if needs.are_installed:
        return f"ok       {purpose}: in this Python"
    if find_uv() is not None:
        names = ", ".join(needs.requirements[:4]) + (", ..." if len(needs.requirements) > 4 else "")
        return f"ok       {purpose}: uv installs {names}, downloaded at the first use"
    return f"absent   {purpose}: pip install uv, or pip install 'kvdoctor[{needs.extra}]'"


def _providers(missing: list[str]) -> str:
    if "onnxruntime" in missing:
        return "MISSING  execution providers: pip install onnxruntime"
    from kvdoctor.runtime.process import Limits, Worker

    try:
        with Worker(Limits(timeout=60)) as worker:
            return f"ok       execution providers: {', '.join(worker.greet().providers)}"
    except (KvdoctorError, WorkerDied) as error:
        return f"BROKEN   onnxruntime does not load ({error}): pip install --force-reinstall onnxruntime"
