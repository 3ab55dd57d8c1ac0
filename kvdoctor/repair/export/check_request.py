"""Refuses requests of `re-export --from CHECKPOINT` that cannot be carried out, before any work is done."""

import json
from pathlib import Path
from typing import Any

from kvdoctor.diagnose.checkpoint import Checkpoint
from kvdoctor.errors import UsageError
from kvdoctor.model.output_folder import refuse_unfit
from kvdoctor.repair.export.exporters.registry import Exporter, find_exporter, load
from kvdoctor.repair.request import ExportRequest, RepairRequest

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model.bin.index.json")
MOST_CONFIG_BYTES = 8 << 20


def refuse_impossible(request: RepairRequest, export: ExportRequest, offline: bool) -> None:
    """Refuse a request that cannot be carried out.

    Raises:
        UsageError: no checkpoint, no weights in it, an OUT that must not be written, an option that the exporter lacks.
    """
    Checkpoint(export.checkpoint, offline).close()
    folder = Path(export.checkpoint)
    if folder.is_dir():
        _refuse_unfit_checkpoint(export.checkpoint, folder)
    if request.out is not None:
        for source in (request.path, export.checkpoint):
            if source is not None:
                refuse_unfit(Path(request.out), Path(source), request.force)
    if export.exporter is not None:
        _refuse_unfit_options(export, find_exporter(export.exporter))


def _refuse_unfit_checkpoint(shown: str, folder: Path) -> None:
    file = folder / "config.json"
    try:
        if file.stat().st_size > MOST_CONFIG_BYTES:
            raise UsageError(f"config.json of {shown!r} is larger than 8 MiB, which no config of a checkpoint is")
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"config.json of {shown!r} cannot be read ({type(error).__name__}); give a checkpoint"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(
            f"config.json of {shown!r} names no model_type; --from takes a folder that save_pretrained wrote"
        )
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        onnx = next(folder.rglob("*.onnx"), None)
        hint = f"it holds an ONNX export ({onnx.name}), and" if onnx is not None else "it has a config.json, and"
        raise UsageError(
            f"no weights in {shown!r}: {hint} --from takes a PyTorch checkpoint with model.safetensors or "
            "pytorch_model.bin, as save_pretrained writes it"
        )


def _refuse_unfit_options(export: ExportRequest, exporter: Exporter) -> None:
    name = exporter.name
    if export.dtype is not None and export.dtype not in exporter.dtypes:
        raise UsageError(f"--dtype {export.dtype}: the exporter {name} writes {', '.join(exporter.dtypes)}")
    if export.task is not None and not exporter.takes_task:
        takers = ", ".join(other.name for other in load() if other.takes_task)
        raise UsageError(f"--task is for the exporter {takers}; {name} takes the task from the checkpoint")
    if export.opset is None:
        return
    if exporter.opsets is None:
        raise UsageError(f"--opset: the exporter {name} writes an opset of its own choice; leave it out")
    if not exporter.opsets[0] <= export.opset <= exporter.opsets[1]:
        raise UsageError(
            f"--opset {export.opset}: the exporter {name} writes {exporter.opsets[0]} to {exporter.opsets[1]}"
        )
