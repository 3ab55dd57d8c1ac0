"""Execution providers in the worker: a plug-in's library is registered, its device chosen, its adapter named.

Only the worker that was started for a provider registers its library, which is native code and may end the process.
"""

import ctypes
import importlib
import json
import os
import sys
from collections import Counter
from functools import cache
from typing import Any

import onnxruntime as ort

from kvdoctor.choices import CPU
from kvdoctor.decode.messages import NodesPlaced
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

GIVEN = "KVDOCTOR_PROVIDER"
"""The variable that says what this worker registers: JSON with `asked`, `name`, `module` and `library`."""
REGISTERED = "kvdoctor"
PLACES = "session.record_ep_graph_assignment_info"
SOFTWARE = 4
"""VK_PHYSICAL_DEVICE_TYPE_CPU of vulkan_core.h."""


@record(slots=False)
class Loaded:
    """A provider by its name in sessions, and the devices of a plug-in, best first; none for a built-in one."""

    name: str
    devices: tuple[Any, ...] = ()
    version: str = ""


@cache
def load(asked: str) -> Loaded:
    """The provider of a job.

    Raises:
        CannotCheck: its library cannot be registered, or offers no device here.
    """
    given = json.loads(os.environ.get(GIVEN, "{}"))
    if given.get("asked") != asked:
        return Loaded(asked)
    name = given["name"]
    if not (given["module"] or given["library"]):
        return Loaded(name)
    if not hasattr(ort, "register_execution_provider_library"):
        raise CannotCheck(f"onnxruntime {ort.__version__} cannot load plug-in libraries; pip install -U onnxruntime")
    library = given["library"] or _find_library(given["module"])
    before = {device.ep_name for device in ort.get_ep_devices()}
    try:
        ort.register_execution_provider_library(REGISTERED, library)
    except Exception as error:  # the bindings raise many types, and all of them are a refusal
        raise CannotCheck(f"onnxruntime {ort.__version__} does not take its library: {one_line(error)}") from None
    devices = [one for one in ort.get_ep_devices() if one.ep_name == name or one.ep_name not in before]
    if not devices:
        raise CannotCheck("its library offers no device on this machine")
    kinds = ("GPU", "NPU", "CPU")
    devices.sort(key=lambda one: kinds.index(one.device.type.name) if one.device.type.name in kinds else len(kinds))
    chosen = [one for one in devices if one.ep_name == devices[0].ep_name]
    return Loaded(chosen[0].ep_name, (chosen[0],), chosen[0].ep_metadata.get("version", ""))


def _find_library(module: str) -> str:
    try:
        found = importlib.import_module(module)
        return str((getattr(found, "get_library_path", None) or found.library_path)())
    except Exception as error:  # a package may raise anything while it is imported
        raise CannotCheck(f"the package {module} does not say where its library is: {one_line(error)}") from None


def open_session(model: Any, options: Any, asked: str, **more: Any) -> Any:
    """Open a session, of a path or of bytes, on the provider of a job; raises what `load` and the runtime raise."""
    found = load(asked)
    if asked != CPU:
        options.add_session_config_entry(PLACES, "1")
    if found.devices:
        options.add_provider_for_devices(list(found.devices), {})
        return ort.InferenceSession(model, options, **more)
    return ort.InferenceSession(model, options, providers=[found.name], **more)


def count_nodes(session: Any, file: str, asked: str) -> NodesPlaced | None:
    """The nodes of a session by where they run; None where this onnxruntime does not say it."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return None
    name, on_cpu, there = load(asked).name, Counter[str](), 0
    for part in session.get_provider_graph_assignment_info():
        nodes = part.get_nodes()
        there += len(nodes) if part.ep_name == name else 0
        on_cpu.update(node.op_type for node in nodes if part.ep_name != name)
    return NodesPlaced(file, there, dict(sorted(on_cpu.items())))


def name_adapter(found: Loaded) -> tuple[str, bool]:
    """The adapter that a provider runs on, and whether it is emulated; empty where that is not known."""
    adapters = _vulkan_adapters() if found.devices and "WebGpu" in found.name and sys.platform == "linux" else []
    # A real device comes first, as the provider chooses it.
    for name, kind in sorted(adapters, key=lambda one: one[1] == SOFTWARE)[:1]:
        return name, kind == SOFTWARE
    device = found.devices[0].device if found.devices else None
    return (f"{device.type.name} {device.vendor}".strip(), device.type.name == "CPU") if device else ("", False)


def _vulkan_adapters() -> list[tuple[str, int]]:
    """The names and kinds of the adapters that Vulkan has, none where it cannot be asked (vulkan_core.h)."""
    try:
        vulkan = ctypes.CDLL("libvulkan.so.1")
    except OSError:
        return []
    create = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo: its type, and nothing else
    instance, count = ctypes.c_void_p(), ctypes.c_uint32()
    if vulkan.vkCreateInstance(create, None, ctypes.byref(instance)):
        return []
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * max(count.value, 1))()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    found = []
    for handle in handles[: count.value]:
        properties = ctypes.create_string_buffer(4096)  # VkPhysicalDeviceProperties: five numbers, then the name
        vulkan.vkGetPhysicalDeviceProperties(ctypes.c_void_p(handle), properties)
        name = properties.raw[20:276].partition(b"\0")[0].decode(errors="replace")
        found.append((name, int.from_bytes(properties.raw[16:20], sys.byteorder)))
    vulkan.vkDestroyInstance(instance, None)
    return found


def one_line(error: Exception) -> str:
    """The last part of the runtime's text: what comes before it are places in its source."""
    text = " ".join(str(error).split())
    return text[-300:].partition(" ")[2] if len(text) > 300 else text
