"""The execution providers that `--provider` names: the package that has each, its environment, and Vulkan drivers.

A provider is built into the onnxruntime that is installed, or is a plug-in: a library of another package, or any file,
that a worker of its own registers. `NAME@DRIVER` runs it on the adapter of that Vulkan driver. Sources: the pages of
the packages on PyPI, onnxruntime.ai/docs/install, and the manifest search of the Vulkan loader.
"""

import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvdoctor.errors import UsageError, similar_names
from kvdoctor.records import record

DRIVERS = ("VK_DRIVER_FILES", "VK_ICD_FILENAMES")
"""What names the drivers for the Vulkan loader: the first is its newer name."""


@record
class Provider:
    """A provider: its short and its full name, its package, the `module` of a plug-in, whether it may run on Vulkan."""

    short: str
    name: str
    package: str
    module: str | None = None
    vulkan: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """The variables that it needs in order to take a software adapter."""
        return {"ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"} if self.vulkan else {}

    @property
    def install(self) -> str:
        """The command that brings it."""
        known = self.package if self.short != "webgpu" else "'kvdoctor[webgpu]'"
        return f"pip install {known}" + (" in place of onnxruntime" if self.module is None else "")


PROVIDERS = (
    Provider("webgpu", "WebGpuExecutionProvider", "onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu", vulkan=True),
    Provider("openvino", "OpenVINOExecutionProvider", "onnxruntime-ep-openvino", "onnxruntime_ep_openvino"),
    Provider("qnn", "QNNExecutionProvider", "onnxruntime-qnn", "onnxruntime_qnn"),
    Provider("ggml", "ggml", "onnxruntime-ggml", "onnxruntime_ggml"),
    Provider("cuda", "CUDAExecutionProvider", "onnxruntime-gpu"),
    Provider("tensorrt", "TensorrtExecutionProvider", "onnxruntime-gpu"),
    Provider("dml", "DmlExecutionProvider", "onnxruntime-directml"),
    Provider("migraphx", "MIGraphXExecutionProvider", "onnxruntime-migraphx"),
)


@record
class Requested:
    """What `--provider` was given: a provider of the table, else a name or the path of a library; and a driver."""

    asked: str
    name: str
    known: Provider | None
    library: str | None
    driver: Path | None

    @property
    def is_plugin(self) -> bool:
        """Whether a library is registered for it."""
        return self.library is not None or (self.known is not None and self.known.module is not None)

    @property
    def is_absent(self) -> bool:
        """Whether it is a plug-in whose package is not installed."""
        return self.library is None and self.is_plugin and find_spec(self.known.module) is None  # type: ignore[union-attr, arg-type]

    @property
    def uses_vulkan(self) -> bool:
        """Whether it may run on a Vulkan driver here."""
        return self.known is not None and self.known.vulkan and sys.platform == "linux"

    @property
    def drivers(self) -> list[Path]:
        """The Vulkan drivers that its worker is given; none where the loader finds those of the system."""
        if not self.uses_vulkan:
            return []
        found = [self.driver] if self.driver is not None else _named_drivers()
        return found or ([] if _system_drivers() else _chromium_drivers()[:1])

    @property
    def reads(self) -> set[str]:
        """The folders of the libraries that its worker loads: its own, and those that the manifests of drivers name."""
        manifests = [one for one in self.drivers or _system_drivers() if self.uses_vulkan and os.access(one, os.R_OK)]
        named = ((one, re.search(rb'"library_path"\s*:\s*"([^"]*/[^"]*)"', one.read_bytes())) for one in manifests)
        found = [one.parent / os.fsdecode(library[1]) for one, library in named if library is not None]
        found += [Path(self.library)] if self.library is not None else []
        return {str(folder) for one in found for folder in (one.parent, one.resolve().parent)}

    @property
    def vulkan_variables(self) -> dict[str, str]:
        """The variables by which its process finds Vulkan: Chromium brings a loader next to its driver."""
        drivers = os.pathsep.join(map(str, self.drivers))
        loader = os.pathsep.join(str(one.parent) for one in self.drivers if (one.parent / "libvulkan.so.1").is_file())
        named = {**dict.fromkeys(DRIVERS, drivers), "LD_LIBRARY_PATH": loader}
        return {name: value for name, value in named.items() if value}

    @property
    def environment(self) -> dict[str, str]:
        """All variables of its worker."""
        found = (self.known.environment if self.known is not None else {}) | self.vulkan_variables
        name, given = "LD_LIBRARY_PATH", os.environ.get("LD_LIBRARY_PATH")
        return found | ({name: os.pathsep.join((given, found[name]))} if given and name in found else {})


def read_provider(asked: str) -> Requested:
    """Read what `--provider` was given, or one entry of `providers`.

    Raises:
        UsageError: the library is not there, or the driver is none that is known here.
    """
    name, _, driver = asked.partition("@") if not Path(asked).is_file() else (asked, "", "")
    known = next((one for one in PROVIDERS if name.lower() in (one.short, one.name.lower())), None)
    is_path = os.sep in name or "/" in name or name.endswith((".so", ".dll", ".dylib"))
    if is_path and not Path(name).is_file():
        raise UsageError(f"--provider {asked}: there is no library {name}")
    return Requested(
        asked=asked,
        name=known.name if known is not None else name,
        known=known,
        library=str(Path(name).absolute()) if is_path else None,
        driver=_find_driver(asked, driver) if driver else None,
    )


def _find_driver(asked: str, driver: str) -> Path:
    drivers = dict(reversed([*list_drivers()]))
    path = drivers.get(driver.lower()) or Path(driver)
    if not path.is_file():
        found = ", ".join(drivers) or "none"
        raise UsageError(f"--provider {asked}: no Vulkan driver {driver}; here are {found}, or give its .json file")
    return path.absolute()


def list_drivers() -> Iterator[tuple[str, Path]]:
    """The Vulkan drivers of this machine, by a short name: those of the variables, of the system, and of Chromium."""
    for path in dict.fromkeys((*_named_drivers(), *_system_drivers(), *_chromium_drivers())):
        stem = path.name.partition(".")[0].removesuffix("_icd").removeprefix("vk_")
        yield {"lvp": "lavapipe"}.get(stem, stem), path


def _named_drivers() -> list[Path]:
    given = next((os.environ[name] for name in DRIVERS if os.environ.get(name)), "")
    return [Path(one) for one in given.split(os.pathsep) if Path(one).is_file()]


def _system_drivers() -> list[Path]:
    roots = ("/etc", "/usr/local/share", "/usr/share", Path.home() / ".local/share")
    return [path for root in roots for path in sorted(Path(root, "vulkan/icd.d").glob("*.json"))]


def _chromium_drivers() -> list[Path]:
    roots = ("/usr/lib/chromium", "/usr/lib64/chromium-browser", "/opt/google/chrome")
    return [path for root in roots if (path := Path(root, "vk_swiftshader_icd.json")).is_file()]


def name_close(asked: str, others: tuple[str, ...]) -> str | None:
    """The provider that is meant by a name that is none; `others` are those that the runtime has."""
    known = {name: one.name for one in PROVIDERS for name in (one.short, one.name.lower())}
    known |= {one.lower().removesuffix("executionprovider"): one for one in others}
    close = similar_names(asked.lower().removesuffix("executionprovider"), known)
    return known[close[0]] if close else None


ADAPTERS_ADVICE = (
    "install a software Vulkan (Debian: apt-get install chromium-common libvulkan1; or mesa-vulkan-drivers of Mesa 25 "
    "and newer), or name its driver in VK_DRIVER_FILES (older loaders: VK_ICD_FILENAMES)"
)


def advise_adapter(asked: Requested) -> str:
    """The next command where a provider finds no adapter."""
    others = [name for name, path in list_drivers() if path not in (asked.drivers or _system_drivers())]
    tried = next((f"try --provider {asked.known.short}@{name}; else " for name in others if asked.known), "")
    return tried + ADAPTERS_ADVICE
