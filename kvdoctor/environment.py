"""`kvdoctor env`: what is here, and the command that mends what is not."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from kvdoctor import __version__
from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.export import made_by_pip
from kvdoctor.export.environments import find_uv, transformers_for
from kvdoctor.export.exporters import Exporter, load

NEEDED = ("onnx", "onnxruntime", "numpy", "click", "rich", "psutil", "msgspec")


def lines() -> Iterator[str]:
    """One line for each thing: a mark, its name, its version, and the command that mends it."""
    yield f"kvdoctor {__version__}, Python {platform.python_version()}, {sys.platform} {platform.machine()}"
    missing = []
    for name in NEEDED:
        try:
            yield f"ok       {name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            missing.append(name)
            yield f"MISSING  {name}: pip install {name}"
    yield _providers(missing)
    has_uv = find_uv() is not None
    if has_uv:
        yield "ok       uv: other versions of onnxruntime can be had in isolated environments"
    else:
        yield "absent   uv, for other versions of onnxruntime and for exporters: pip install uv"
    yield _checkpoints(has_uv)
    yield from (_exporter(exporter, has_uv) for exporter in load())
    yield "limits   time of each answer, and resident memory of the worker (sampled every 20 ms)"


def _exporter(exporter: Exporter, has_uv: bool) -> str:
    """How an exporter is got for `re-export --from`."""
    needs, what = exporter.needs, f"exporter {exporter.name}"
    if needs.are_here:
        return f"ok       {what}: in this Python"
    if has_uv:
        return f"ok       {what}: uv brings {', '.join(needs.requirements[:4])}, ..., the first time over the network"
    if made_by_pip.is_kept(needs.requirements):
        return f"ok       {what}: in the cache, made by venv and pip"
    if made_by_pip.can_make():
        return f"ok       {what}: venv and pip bring it, the first time over the network; faster: pip install uv"
    return f"absent   {what}: pip install uv, or pip install 'kvdoctor[{needs.extra}]'"


def _checkpoints(has_uv: bool) -> str:
    """Whether `step-test --reference` can run a checkpoint, and where."""
    needs = transformers_for({})
    if needs.are_here:
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in needs.modules)
        return f"ok       {versions}: --reference runs checkpoints in a process of this Python"
    what = " and ".join(needs.requirements[:2])
    if has_uv:
        return f"ok       {what}: uv brings them for --reference, the first time over the network"
    if made_by_pip.can_make() or made_by_pip.is_kept(needs.requirements):
        return f"ok       {what}: venv and pip bring them for --reference, the first time over the network"
    return f"absent   torch and transformers, for --reference: pip install uv, or pip install 'kvdoctor[{needs.extra}]'"


def _providers(missing: list[str]) -> str:
    if "onnxruntime" in missing:
        return "MISSING  execution providers: pip install onnxruntime"
    from kvdoctor.child import Limits, Worker

    try:
        with Worker(Limits(timeout=60)) as worker:
            return f"ok       execution providers: {', '.join(worker.greet()['providers'])}"
    except (KvdoctorError, WorkerDied) as error:
        return f"BROKEN   onnxruntime does not load ({error}): pip install --force-reinstall onnxruntime"
