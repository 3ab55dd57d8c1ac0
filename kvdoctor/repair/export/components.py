"""The components that kvdoctor uses: what is installed, and the command that installs or repairs the rest."""

import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import TYPE_CHECKING

from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.repair.export.exporters import EXPORTERS
from kvdoctor.report.info_document import Component, EnvironmentDocument
from kvdoctor.runtime.environments import Requirements, find_uv, transformers_for
from kvdoctor.runtime.providers import ADAPTERS_ADVICE, PROVIDERS, list_drivers, read_provider

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime

NEEDED = ("onnx", "onnxruntime", "numpy", "click", "rich", "psutil", "msgspec")


def describe_components() -> EnvironmentDocument:
    """Return the state, name and version of each component, and the command that installs it."""
    machine = f"{sys.platform} {platform.machine()}"
    return EnvironmentDocument(platform.python_version(), machine, tuple(_list_components()))


def _list_components() -> Iterator[Component]:
    missing = []
    for name in NEEDED:
        try:
            yield Component("ok", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
            yield Component("MISSING", f"{name}: pip install {name}")
    yield from _providers(missing)
    if find_uv() is not None:
        yield Component("ok", "uv: makes isolated environments for other versions of onnxruntime and for exporters")
    else:
        yield Component("absent", "uv, for other versions of onnxruntime and for exporters: pip install uv")
    yield _source("checkpoints for --reference", transformers_for({}))
    yield from (_source(f"exporter {exporter.name}", exporter.needs) for exporter in EXPORTERS)
    yield Component("limits", "time per answer, and resident memory of the worker (sampled every 20 ms)")


def _source(purpose: str, needs: Requirements) -> Component:
    """Return where the packages for a purpose come from: this Python, or an environment that uv makes."""
    if needs.are_installed:
        return Component("ok", f"{purpose}: in this Python")
    if find_uv() is not None:
        names = ", ".join(needs.requirements[:4]) + (", ..." if len(needs.requirements) > 4 else "")
        return Component("ok", f"{purpose}: uv installs {names}, downloaded at the first use")
    return Component("absent", f"{purpose}: pip install uv, or pip install 'kvdoctor[{needs.extra}]'")


def _providers(missing: list[str]) -> Iterator[Component]:
    if "onnxruntime" in missing:
        yield Component("MISSING", "execution providers: pip install onnxruntime")
        return
    from kvdoctor.runtime.client import Runtime
    from kvdoctor.runtime.process import Limits

    try:
        with Runtime(Limits(timeout=60)) as runtime:
            yield Component("ok", f"execution providers: {', '.join(runtime.providers)}")
            if runtime.sandbox:
                yield Component("ok", f"sandbox of the worker: {runtime.sandbox}")
            else:
                yield Component("absent", "sandbox of the worker: needs Linux 5.13 or newer with Landlock")
            yield from _plugins(runtime)
    except (KvdoctorError, WorkerDied) as error:
        yield Component("BROKEN", f"onnxruntime does not load ({error}): pip install --force-reinstall onnxruntime")


def _plugins(runtime: "Runtime") -> Iterator[Component]:
    """The plug-in providers that are installed, each with its device, and those that could be; Vulkan drivers."""
    absent = []
    for known in (one for one in PROVIDERS if one.module is not None):
        if read_provider(known.short).is_absent:
            absent.append(f"{known.short}: {known.install}")
            continue
        found = runtime.find_provider(known.short)
        on = f" on {found.adapter}" + ", a software adapter" * found.software if found.adapter else ""
        text = f"--provider {known.short}: {found.name} {found.version}{on}" if not found.error else found.error
        yield Component("ok", text) if not found.error else Component("BROKEN", f"--provider {known.short}: {text}")
    if absent:
        yield Component("absent", f"plug-in providers: {'; '.join(absent)}")
    drivers = ", ".join(f"{name} ({path})" for name, path in list_drivers())
    if drivers:
        yield Component("ok", f"Vulkan drivers, for --provider webgpu@NAME: {drivers}")
    elif sys.platform == "linux":
        yield Component("absent", f"Vulkan drivers: {ADAPTERS_ADVICE}")
