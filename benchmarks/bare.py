"""Replays the runs of a step-test without kvdoctor: `python benchmarks/bare.py PLAN FOLDER`.

The alternative to kvdoctor's figures: the same sessions with the same options and the same calls in the same order, by
numpy and onnxruntime alone. `record.py` writes the plan.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

Outputs = dict[int, dict[str, Any]]


def open_session(folder: Path, entry: dict[str, Any]) -> Any:
    """Open a file at the optimization level of the plan; None where the runtime refuses it."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel(entry["level"])
    options.log_severity_level = entry["log_severity"]
    options.intra_op_num_threads = entry["intra_op_threads"]
    options.inter_op_num_threads = entry["inter_op_threads"]
    try:
        return ort.InferenceSession(str(folder / entry["file"]), options, providers=entry["providers"])
    except Exception:
        return None


def feed(entry: dict[str, Any], outputs: Outputs) -> Any:
    """An output of an earlier run, or an array: of the recorded values, else of noise."""
    if "run" in entry:
        return outputs[entry["run"]][entry["output"]]
    shape, kind = entry["shape"], np.dtype(entry["dtype"])
    if "values" in entry:
        array = np.array(entry["values"], kind).reshape(shape)
    else:
        array = np.random.default_rng(0).standard_normal(shape, np.float32).astype(kind)
    return ort.OrtValue.ortvalue_from_numpy(array)


def replay(steps: list[dict[str, Any]], folder: Path) -> int:
    """Run the steps of one stack; returns the number of runs that failed."""
    sessions: dict[int, Any] = {}
    outputs: Outputs = {}
    failed = 0
    for number, step in enumerate(steps):
        if step["do"] == "open":
            sessions[number] = open_session(folder, step)
            continue
        session = sessions[step["session"]]
        names = [output.name for output in session.get_outputs()]
        feeds = {name: feed(entry, outputs) for name, entry in step["feeds"].items()}
        try:
            values = session.run_with_ort_values(names, feeds)
        except Exception:
            failed += 1
        else:
            outputs[number] = {name: v for name, v in zip(names, values, strict=True) if name in step["keep"]}
        for old in step["drop"]:
            del outputs[old]
    return failed


def main() -> None:
    """Replay every stack of the plan."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    failed = sum(replay(steps, Path(sys.argv[2])) for steps in plan["stacks"])
    if failed != plan["failed"]:
        sys.exit(f"{failed} runs failed, but {plan['failed']} when the plan was recorded")


if __name__ == "__main__":
    main()
