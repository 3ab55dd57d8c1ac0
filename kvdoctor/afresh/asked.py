"""What `re-export --from CHECKPOINT` asks for, refused before any work is done where it cannot be had."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdoctor.cure.converting import Fit
from kvdoctor.errors import UsageError
from kvdoctor.export.exporters import Exporter, named
from kvdoctor.out_folder import refuse_unfit
from kvdoctor.reference import Checkpoint

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model.bin.index.json")
MOST_CONFIG_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of the command. `path` is the sick model whose contract is kept, None where there is no ONNX yet.

    Without `out` the export is made and proved in a private folder, and nothing is kept. `because` is a report of
    kvdoctor that takes the place of a diagnosis of `path`. `fit` is the layout that the export shall have.
    """

    checkpoint: str
    path: str | None = None
    out: str | None = None
    force: bool = False
    exporter: str | None = None
    opset: int | None = None
    dtype: str | None = None
    task: str | None = None
    because: str | None = None
    fix: tuple[str, ...] = ()
    keep_unproved: bool = False
    fit: Fit = field(default_factory=Fit)


def refuse_impossible(asked: Asked, offline: bool) -> None:
    """Refuse what cannot be done as it was asked for.

    Raises:
        UsageError: no checkpoint, no weights in it, an OUT that must not be written, an option the exporter has not.
    """
    Checkpoint(asked.checkpoint, offline).close()
    folder = Path(asked.checkpoint)
    if folder.is_dir():
        _refuse_unfit_checkpoint(asked.checkpoint, folder)
    if asked.out is not None:
        for source in (asked.path, asked.checkpoint):
            if source is not None:
                refuse_unfit(Path(asked.out), Path(source), asked.force)
    if asked.exporter is not None:
        _refuse_unfit_options(asked, named(asked.exporter))


def _refuse_unfit_checkpoint(shown: str, folder: Path) -> None:
    file = folder / "config.json"
    try:
        if file.stat().st_size > MOST_CONFIG_BYTES:
            raise UsageError(f"config.json of {shown!r} is larger than 8 MiB; it is no config of a checkpoint")
        config: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"config.json of {shown!r} cannot be read ({type(error).__name__}); give a checkpoint"
        ) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"config.json of {shown!r} names no model_type; --from takes what save_pretrained wrote")
    if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
        onnx = next(folder.rglob("*.onnx"), None)
        hint = f"it holds an ONNX export ({onnx.name}), and" if onnx is not None else "it has a config.json, and"
        raise UsageError(
            f"no weights in {shown!r}: {hint} --from takes a PyTorch checkpoint with model.safetensors or "
            "pytorch_model.bin, as save_pretrained writes it"
        )


def _refuse_unfit_options(asked: Asked, exporter: Exporter) -> None:
    name = exporter.name
    if asked.dtype is not None and asked.dtype not in exporter.dtypes:
        raise UsageError(f"--dtype {asked.dtype}: the exporter {name} writes {', '.join(exporter.dtypes)}")
    if asked.task is not None and not exporter.takes_task:
        raise UsageError(f"--task is for the exporter optimum; {name} takes the task from the checkpoint")
    if asked.opset is None:
        return
    if exporter.opsets is None:
        raise UsageError(f"--opset: the exporter {name} writes an opset of its own choice; leave it out")
    if not exporter.opsets[0] <= asked.opset <= exporter.opsets[1]:
        raise UsageError(
            f"--opset {asked.opset}: the exporter {name} writes {exporter.opsets[0]} to {exporter.opsets[1]}"
        )
