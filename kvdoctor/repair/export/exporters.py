"""The exporters: the packages that each needs, the layouts it writes and the flags it takes; and what is installed.

None of them is imported here: `scripts/run.py` does the export in a Python of its own, with the script that the
exporter names.
"""

import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.options import ReExportChoices
from kvdoctor.records import record
from kvdoctor.report.info_document import Component, EnvironmentDocument
from kvdoctor.report.repair_record import ExportChoice
from kvdoctor.runtime.environments import GENAI, TORCH, TRANSFORMERS, Requirements, find_uv, transformers_for
from kvdoctor.runtime.providers import ADAPTERS_ADVICE, PROVIDERS, list_drivers, read_provider

if TYPE_CHECKING:
    from kvdoctor.runtime.client import Runtime

ASKED = "asked for"
SOME_TAKE = ("task", "fusions", "static_cache")
"""The options of `re-export` that not every exporter has."""


@record
class SourceFacts:
    """Facts of the model that an export replaces; all empty if there is none.

    `layouts` are those of its stacks, `roles` those of its files, `opset` is the newest that a file imports, `dtype`
    the element type of its cache, `faults` are the checks that fired as warnings or errors.
    """

    name: str = ""
    layouts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    opset: int | None = None
    dtype: str | None = None
    faults: tuple[str, ...] = ()


Flags = tuple[dict[str, Any], tuple[ExportChoice, ...]]
"""The flags of a script, and the reason for each."""


@record
class Exporter:
    """One exporter.

    `writes` are the layouts of its exports, by the beginnings of their names. `opsets` are the lowest and the highest
    ONNX opset that it can write, None if the caller cannot choose one. `flags` gives the flags of its script for a
    model to be replaced and what is asked for, and the reason for each. `takes` are the options of `re-export` that not
    every exporter has. `own_layout` says that its files are for a runtime of its own: it
    never stands in for another exporter that failed.
    """

    name: str
    summary: str
    script: str
    needs: Requirements
    writes: tuple[str, ...]
    dtypes: tuple[str, ...]
    opsets: tuple[int, int] | None
    flags: Callable[[SourceFacts, ReExportChoices], Flags]
    takes: tuple[str, ...] = ()
    own_layout: bool = False


PAIR = "decoder-with-past"
OF_TRANSFORMERS_5 = (f"torch=={TORCH}", "transformers==5.23.0", "onnx==1.23.2")


def choose_merge(source: SourceFacts, _asked: ReExportChoices) -> Flags:
    """Whether the two decoders are merged: as in the model that is replaced."""
    if PAIR in source.roles and "decoder-merged" not in source.roles:
        return {"merge": False}, (ExportChoice("merge", "no", f"{source.name} is a pair of decoders"),)
    why = f"{source.name} has a merged decoder" if "decoder-merged" in source.roles else "Optimum's default"
    return {"merge": True}, (ExportChoice("merge", "yes, if there are two decoders", why),)


OPTIMUM = Exporter(
    name="optimum",
    summary="decoder, decoder with past, and both merged, with Optimum's names",
    script="with_optimum.py",
    needs=Requirements(
        (
            *(f"torch=={TORCH}", f"transformers=={TRANSFORMERS}", "optimum==2.1.0", "optimum-onnx==0.1.0"),
            *("onnx==1.23.2", "onnxruntime==1.31.1", "accelerate==1.15.0", "numpy==2.4.6", "protobuf==7.36.2"),
        ),
        ("torch", "transformers", "optimum.exporters.onnx.convert", "onnx", "onnxruntime"),
        "optimum",
    ),
    writes=("optimum",),
    dtypes=("fp32", "fp16", "bf16"),
    opsets=(11, 20),
    flags=choose_merge,
    takes=("task",),
)
"""Hugging Face Optimum (optimum-onnx): names that Optimum, transformers.js and most loops know.

It is limited to transformers < 4.58. Its merged decoder returns an emptied cross-attention cache, which is repaired
afterwards.
"""

SIZES = {"rows": 3, "prompt": 7, "source": 9, "decoder_tokens": 4}
"""Two new tokens are traced with a past of 4 or 7 tokens: all sizes differ."""
FREEZES = "one would freeze their number at 1"
FROZEN = {"past-axis-frozen", "batch-axis-frozen", "sequence-axis-frozen"}


def choose_sample(source: SourceFacts, asked: ReExportChoices) -> Flags:
    """Samples that freeze no axis, with padding so that the graphs take the mask."""
    frozen = sorted(FROZEN.intersection(source.faults))
    why = f"{', '.join(frozen)} in {source.name}" if frozen else "torch treats lengths of 0 and 1 as constants"
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in SIZES.items())
    choices = [
        ExportChoice("sample", sizes, why),
        ExportChoice("new tokens", "2 per step, unless a recurrent state forbids it", FREEZES),
        ExportChoice("padding", "in the sample", "a mask of ones is left out of the graphs"),
    ]
    if asked.fusions is not None:
        choices.append(ExportChoice("fused operators", f"for {asked.fusions}", ASKED))
    if asked.static_cache is not None:
        choices.append(ExportChoice("cache", f"{asked.static_cache} tokens, written in place", ASKED))
    own = {"fusions": asked.fusions, "static": asked.static_cache}
    return {**SIZES, "multi_token": True, "padded": True, **own}, tuple(choices)


TRANSFORMERS_5 = Exporter(
    name="transformers",
    summary="prefill.onnx and decode.onnx, and encoder.onnx if there is one, with the names of transformers 5",
    script="with_transformers.py",
    needs=Requirements(
        (*OF_TRANSFORMERS_5, "onnxscript==0.7.2", "onnx-ir==1.1.0", "numpy==2.4.6"),
        ("torch", "transformers.exporters", "onnxscript", "onnx_ir"),
        "transformers",
    ),
    writes=("transformers",),
    dtypes=("fp32", "fp16", "bf16"),
    opsets=(18, 24),
    flags=choose_sample,
    takes=("fusions", "static_cache"),
)
"""The exporter of transformers 5: a graph for the prompt and one for the steps, traced by torch.export.

torch.export treats a length of 0 or 1 as a constant, so the exporter's own sample of an encoder-decoder, whose decoder
starts with one token, freezes the past at 1. kvdoctor's samples have lengths of two or more, all different.
"""


def choose_kernels(_source: SourceFacts, _asked: ReExportChoices) -> Flags:
    """The kernels that the graph is built for."""
    why = "the export is diagnosed and proved on the CPU"
    return {"provider": "cpu"}, (ExportChoice("kernels", "for the CPU", why),)


ONNXRUNTIME_GENAI = Exporter(
    name="genai",
    summary="model.onnx and genai_config.json for onnxruntime-genai",
    script="with_genai.py",
    needs=Requirements(
        (*OF_TRANSFORMERS_5, "onnx-ir==1.1.0", *GENAI),
        ("torch", "transformers", "onnxruntime_genai.models.builder", "onnx_ir"),
        "genai",
    ),
    writes=("genai", "onnxruntime-genai"),
    dtypes=("fp32", "fp16", "bf16", "int8", "int4"),
    opsets=None,
    flags=choose_kernels,
    own_layout=True,
)
"""The model builder of onnxruntime-genai: one graph with GroupQueryAttention, for onnxruntime-genai itself.

It builds decoder-only models of the families that it supports, and needs the tokenizer next to the weights.
"""

EXPORTERS = (OPTIMUM, TRANSFORMERS_5, ONNXRUNTIME_GENAI)
"""All exporters, the one to try first before the others."""


def find_exporter(name: str) -> Exporter:
    """The exporter of that name. Raises KeyError: there is none."""
    return {exporter.name: exporter for exporter in EXPORTERS}[name]


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
