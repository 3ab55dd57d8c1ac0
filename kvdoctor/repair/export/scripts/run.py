"""Exports a checkpoint to ONNX: `python run.py arguments.json`, in a Python that has `requirements.txt`.

The only argument is a JSON object, or the file that holds one: `script`, the file next to this one that knows the
exporter; `checkpoint`, a folder or a model of the hub; `out`, the folder to write into; `local`, whether nothing may be
downloaded; `task`, `dtype` and `opset`, each null where the exporter may choose; and `flags` of that exporter.

Each line of standard output is a JSON object: the versions of the libraries, then `doing`, what is being done, and at
the end `made`, the files, or `failed`, the reason, with its `stage`: config, weights or export. Code of a checkpoint is
never run, its weights are never unpickled.
"""

import contextlib
import json
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # read by torch when it is imported

import torch
import transformers

HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "MTModel", "EncoderDecoderModel", "ForPreTraining")
"""Endings of the names of classes that return logits over tokens."""
AUTO = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForVision2Seq",
    "AutoModelForImageTextToText",
    "AutoModelForCausalLM",
)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MOST_WORDS = 1000


class CannotExport(Exception):
    """A checkpoint cannot be exported; the message says why."""


class ExportJob:
    """The request, the progress messages, and the checkpoint."""

    def __init__(self, asked: dict[str, Any], tell: Callable[..., None]) -> None:
        self.asked = asked
        self.checkpoint, self.out = str(asked["checkpoint"]), Path(asked["out"])
        self.task, self.dtype, self.opset = asked["task"], asked["dtype"] or "fp32", asked["opset"]
        self.flags: dict[str, Any] = asked["flags"]
        self.given: dict[str, Any] = {"local_files_only": bool(asked["local"]), "trust_remote_code": False}
        self._tell = tell
        self.stage = "config"

    def doing(self, text: str) -> None:
        """Report what is done next."""
        self._tell(doing=text)

    def config(self) -> Any:
        """The configuration of the checkpoint."""
        return transformers.AutoConfig.from_pretrained(self.checkpoint, **self.given)

    def load(self) -> Any:
        """The model of the checkpoint in the requested type.

        Raises:
            CannotExport: it lacks weights, which would be made up, or no class gives logits from it.
        """
        config = self.config()
        named = model_class(config)
        self.stage = "weights"
        self.doing("loading the checkpoint")
        model, info = named.from_pretrained(
            self.checkpoint,
            config=config,
            torch_dtype=DTYPES[self.dtype],
            weights_only=True,
            output_loading_info=True,
            **self.given,
        )
        lacking = sorted(info["missing_keys"])
        if lacking or info["mismatched_keys"]:
            keys = ", ".join(map(str, (lacking or list(info["mismatched_keys"]))[:3]))
            raise CannotExport(f"its weights do not fill {type(model).__name__}: {keys} missing or of another shape")
        self.stage = "export"
        return model.eval()


def model_class(config: Any) -> Any:
    """The class of a checkpoint: the one it names, if that returns logits over tokens."""
    for name in getattr(config, "architectures", None) or ():
        named = getattr(transformers, str(name), None)
        if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel) and str(name).endswith(HEADS):
            return named
    for name in AUTO:
        auto = getattr(transformers, name, None)
        if auto is not None and type(config) in auto._model_mapping:
            return auto
    raise CannotExport(f"transformers {transformers.__version__} has no class that decodes {config.model_type!r}")


def main() -> None:
    """Carry out the request of the argument."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print where they like

    def tell(**facts: Any) -> None:
        answers.write(json.dumps(facts) + "\n")
        answers.flush()

    given = sys.argv[1]
    asked = json.loads(given if given.startswith("{") else Path(given).read_text(encoding="utf-8"))
    if asked.get("watched"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    tell(torch=torch.__version__, transformers=transformers.__version__)
    script = Path(__file__).with_name(asked["script"])
    job = ExportJob(asked, tell)
    try:
        export = runpy.run_path(str(script))["export"]
        job.out.mkdir(parents=True, exist_ok=True)
        versions = export(job)
        made = sorted(path.relative_to(job.out).as_posix() for path in job.out.rglob("*") if path.is_file())
        tell(made=made, versions={"torch": torch.__version__, "transformers": transformers.__version__, **versions})
    except Exception as error:  # whatever a checkpoint makes these libraries raise is the answer
        traceback.print_exc()
        tell(failed=_words(error), stage=job.stage)


def _words(error: BaseException) -> str:
    """An error and its cause in one line."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    root = error.__cause__ or error.__context__
    while root is not None and (root.__cause__ or root.__context__) is not None:
        root = root.__cause__ or root.__context__
    if root is not None and str(root) and str(root) not in said:
        said = f"{said[: MOST_WORDS // 2]}; it came from {type(root).__name__}: {' '.join(str(root).split())}"
    return said[:MOST_WORDS]


def _end_with_parent() -> None:
    """End this process when standard input ends, with the parent, in the middle of its work."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.readline():
            pass
    os._exit(1)


if __name__ == "__main__":
    main()
