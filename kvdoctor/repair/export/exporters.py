"""The exporters: the packages that each needs, the layouts it writes and the flags it takes.

None of them is imported here: `scripts/run.py` does the export in a Python of its own, with the script that the
exporter names.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import describe
from kvdoctor.errors import UsageError
from kvdoctor.records import record
from kvdoctor.report.document import Report
from kvdoctor.report.facts import FileFacts
from kvdoctor.report.json_format import read_report
from kvdoctor.report.repair_record import ExportChoice, PortChange, RepairSide
from kvdoctor.runtime.environments import GENAI, TORCH, TRANSFORMERS, Requirements


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


@record(slots=False)
class SourceModel:
    """The model that is replaced: facts for the choice of an exporter, its findings, and its files as in a report."""

    facts: SourceFacts
    before: RepairSide
    files: tuple[FileFacts, ...]


def no_source(checkpoint: str) -> SourceModel:
    """The facts if there is no model to replace."""
    return SourceModel(SourceFacts(name=checkpoint), RepairSide("nothing-found", ()), ())


def read_source(report: Report) -> SourceModel:
    """The facts in a report."""
    files, contracts = report.model.files, [stack.contract for stack in report.stacks if stack.contract is not None]
    decoders = (file.opsets for file in files if "decoder" in file.role)
    facts = SourceFacts(
        name=report.model.path,
        layouts=tuple(stack.layout for stack in report.stacks if stack.contract is not None),
        roles=tuple(dict.fromkeys(file.role for file in files)),
        opset=max(filter(None, (opsets.get("", opsets.get("ai.onnx")) for opsets in decoders)), default=None),
        dtype=next((slot.dtype for contract in contracts for slot in contract.slots), None),
        faults=tuple(dict.fromkeys(found.name for found in report.findings if found.severity != "note")),
    )
    return SourceModel(facts, RepairSide(report.verdict, report.findings), files)


def read_because(path: str) -> SourceModel:
    """Read the report that `--because` names.

    Raises:
        UsageError: it cannot be read, or is not a report; the message says how to write one.
    """
    try:
        return read_source(read_report(path))
    except UsageError as reason:
        raise UsageError(f"--because {reason}") from None


DECODERS = ("decoder-merged", "decoder", "decoder-with-past")


def delete_surplus_decoders(folder: Path, known: SourceModel) -> tuple[str, ...]:
    """Delete decoders that the replaced model does not have, if all of its own are there; gives their names."""
    if not known.facts.roles:
        return ()
    files = open_folder(str(folder)).files
    wanted = set(known.facts.roles).intersection(DECODERS)
    if not wanted or not wanted <= {file.role for file in files}:
        return ()
    surplus = [file for file in files if file.role in DECODERS and file.role not in wanted]
    shared = {external.path for file in files if file not in surplus for external in file.external}
    for file in surplus:
        file.path.unlink()
        for external in file.external:
            if external.path not in shared and external.path.is_relative_to(folder):
                external.path.unlink(missing_ok=True)
    return tuple(file.name for file in surplus)


def compare_ports(known: SourceModel, files: tuple[FileFacts, ...]) -> Iterator[PortChange]:
    """Inputs and outputs that differ from the replaced model, in files of the same name or role."""
    for file in files:
        named = [other for other in known.files if other.path == file.path]
        same = [other for other in known.files if other.role == file.role]
        alone = len(same) == 1 and sum(other.role == file.role for other in files) == 1
        for before in (named or (same if alone else []))[:1]:
            for sides in ((before.inputs, file.inputs), (before.outputs, file.outputs)):
                was, now = ({str(port["name"]): port for port in ports} for ports in sides)
                for name in dict.fromkeys([*was, *now]):
                    if not _is_compatible(was.get(name), now.get(name)):
                        types = (None if port is None else _describe(port) for port in (was.get(name), now.get(name)))
                        yield PortChange(file.path, name, *types)


def _is_compatible(was: dict[str, Any] | None, now: dict[str, Any] | None) -> bool:
    """Whether a caller feeds and reads both in the same way; names of free axes do not matter."""
    if was is None or now is None or was.get("dtype") != now.get("dtype"):
        return False
    old, new = was.get("shape"), now.get("shape")
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(a == b or not isinstance(b, int) for a, b in zip(old, new, strict=True))


def _describe(port: dict[str, Any]) -> str:
    return str(port.get("dtype")) if port.get("shape") is None else describe(str(port.get("dtype")), port["shape"])


Flags = tuple[dict[str, Any], tuple[ExportChoice, ...]]
"""The flags of a script, and the reason for each."""


@record
class Exporter:
    """One exporter.

    `writes` are the layouts of its exports, by the beginnings of their names. `opsets` are the lowest and the highest
    ONNX opset that it can write, None if the caller cannot choose one. `flags` gives the flags of its script for a
    model to be replaced, and the reason for each. `own_layout` says that its files are for a runtime of its own: it
    never stands in for another exporter that failed.
    """

    name: str
    summary: str
    script: str
    needs: Requirements
    writes: tuple[str, ...]
    dtypes: tuple[str, ...]
    opsets: tuple[int, int] | None
    flags: Callable[[SourceFacts], Flags]
    takes_task: bool = False
    own_layout: bool = False


PAIR = "decoder-with-past"
OF_TRANSFORMERS_5 = (f"torch=={TORCH}", "transformers==5.23.0", "onnx==1.23.2")


def choose_merge(source: SourceFacts) -> Flags:
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
    takes_task=True,
)
"""Hugging Face Optimum (optimum-onnx): names that Optimum, transformers.js and most loops know.

It is limited to transformers < 4.58. Its merged decoder returns an emptied cross-attention cache, which is repaired
afterwards.
"""

SIZES = {"rows": 3, "prompt": 7, "source": 9, "decoder_tokens": 4}
"""Two new tokens are traced with a past of 4 or 7 tokens: all sizes differ."""
FREEZES = "one would freeze their number at 1"
FROZEN = {"past-axis-frozen", "batch-axis-frozen", "sequence-axis-frozen"}


def choose_sample(source: SourceFacts) -> Flags:
    """Samples that freeze no axis, with padding so that the graphs take the mask."""
    frozen = sorted(FROZEN.intersection(source.faults))
    why = f"{', '.join(frozen)} in {source.name}" if frozen else "torch treats lengths of 0 and 1 as constants"
    sizes = ", ".join(f"{name.replace('_', ' ')} {size}" for name, size in SIZES.items())
    choices = (
        ExportChoice("sample", sizes, why),
        ExportChoice("new tokens", "2 per step, unless a recurrent state forbids it", FREEZES),
        ExportChoice("padding", "in the sample", "a mask of ones is left out of the graphs"),
    )
    return {**SIZES, "multi_token": True, "padded": True}, choices


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
)
"""The exporter of transformers 5: a graph for the prompt and one for the steps, traced by torch.export.

torch.export treats a length of 0 or 1 as a constant, so the exporter's own sample of an encoder-decoder, whose decoder
starts with one token, freezes the past at 1. kvdoctor's samples have lengths of two or more, all different.
"""


def choose_kernels(source: SourceFacts) -> Flags:  # noqa: ARG001 - the signature of all exporters
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
