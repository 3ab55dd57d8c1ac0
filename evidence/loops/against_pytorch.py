"""The tokens of programs compared with those of PyTorch's `generate`, for exports of many architectures.

ZOO/EXPORTER/NAME is an export and ZOO/checkpoints-EXPORTER/NAME its checkpoint. Those of Optimum's exports are written
by `evidence/consumers/random_checkpoints.py`, the others with `--keep-checkpoint` of the zoo's script.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.loop_programs import materials, program

from evidence.loops.pytorch_tokens import MOST
from evidence.zoo.making import ENVIRONMENTS
from kvdoctor.addons.loops.contract_file import CONTRACT_FILE, VECTORS_FILE
from kvdoctor.addons.loops.languages import LANGUAGES

SCRIPT = Path(__file__).parent / "pytorch_tokens.py"
ARCHITECTURES = {
    "optimum": (
        *("gpt2", "llama", "mistral", "gemma", "gemma3_text", "qwen3", "phi3", "bloom", "opt", "gpt_neox", "falcon"),
        *("marian", "t5", "whisper", "bart"),
    ),
    "transformers": ("llama", "gpt2", "qwen3", "mistral", "gemma2", "t5", "marian", "bart", "whisper"),
}
HEAD = f"""
## Against PyTorch

Checkpoints with random weights: the greedy tokens after one prompt, {MOST} or up to the one that ends the text,
compared with `generate` of the exporter's own transformers on the checkpoint.

"""


def table(zoo: Path, languages: list[str], scratch: Path) -> str:
    """A line for each export, with a cell for each language."""
    titles = [LANGUAGES[name].title for name in languages]
    lines = [f"| exporter | architecture | {' | '.join(titles)} |", f"|{' --- |' * (len(languages) + 2)}"]
    for exporter, names in ARCHITECTURES.items():
        for name, due in zip(names, _ask_pytorch(zoo, exporter, names, scratch), strict=True):
            cells = [_compare(language, zoo / exporter / name, due, scratch) for language in languages]
            lines.append(f"| {exporter} | {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    return "".join(f"{line}\n" for line in lines)


def _ask_pytorch(zoo: Path, exporter: str, names: tuple[str, ...], scratch: Path) -> list[list[int]]:
    """The tokens of each checkpoint, after the prompt of the first run of its loop."""
    pairs = [
        (zoo / f"checkpoints-{exporter}" / name, materials(zoo / exporter / name, scratch).folder) for name in names
    ]
    command = [*ENVIRONMENTS[exporter].command(), SCRIPT, *(path for pair in pairs for path in pair)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


def _compare(language: str, model: Path, due: list[int], scratch: Path) -> str:
    made = materials(model, scratch)
    run = json.loads((made.folder / VECTORS_FILE).read_text("utf-8"))["runs"][0]
    calls = ["--calls", json.dumps(list(_list_calls(run["calls"], made.folder)))]
    done = program(language, scratch).run("--model", model, "--contract", made.folder / CONTRACT_FILE, *calls)
    found = [int(token) for token in done.stdout.strip().split(",") if token]
    return f"{len(due)} tokens" if found == due and done.returncode == 0 else f"**{found} in place of {due}**"


def _list_calls(calls: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Those that encode the source of a run, and one that generates after its prompt."""
    for call in calls:
        if call["call"] == "prefill":
            yield {"call": "generate", "rows": call["rows"], "most": MOST}
        elif call["call"] == "encode-file":
            yield call | {"file": str(folder / call["file"])}
        elif call["call"] == "encode":
            yield call
