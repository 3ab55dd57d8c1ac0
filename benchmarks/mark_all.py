"""The search by hand: load the model, make every value an output, run the step and the call without a cache.

`python benchmarks/mark_all.py MODEL` for the decoders of models.py. numpy, onnx and onnxruntime only.
"""

import sys
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

PROMPT = 3


def feeds(session: Any, past: int, tokens: "np.ndarray[Any, Any]", cache: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a call with some tokens on a past, with consistent lengths."""
    total = past + tokens.shape[1]
    given = {
        "input_ids": tokens,
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.arange(past, total)[None],
    }
    for port in session.get_inputs():
        if port.name.startswith("past"):
            empty = np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
            given[port.name] = cache.get(port.name, empty)
    return given


def main(path: str) -> None:
    """Print the first value whose last row differs."""
    model = onnx.load(path)
    values = [name for node in model.graph.node for name in node.output]
    known = {output.name for output in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in values if name not in known)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    vocabulary = next(output.shape[-1] for output in session.get_outputs() if output.name == "logits")
    tokens = np.random.default_rng(0).integers(vocabulary // 4, 3 * vocabulary // 4, (1, PROMPT + 1))
    first = dict(zip(names, session.run(names, feeds(session, 0, tokens[:, :PROMPT], {})), strict=True))
    cache = {f"past_key_values.{n.removeprefix('present.')}": v for n, v in first.items() if n.startswith("present")}
    step = dict(zip(names, session.run(names, feeds(session, PROMPT, tokens[:, PROMPT:], cache)), strict=True))
    whole = dict(zip(names, session.run(names, feeds(session, 0, tokens, {})), strict=True))
    for name in values:
        one, two = step[name], whole[name]
        fits = one.ndim == two.ndim == 4 and one.dtype == np.float32 and one[:, :, -1].shape == two[:, :, -1].shape
        if fits and np.abs(one[:, :, -1] - two[:, :, -1]).max(initial=0.0) > 1e-3:
            sys.stdout.write(f"{name}\n")
            return


if __name__ == "__main__":
    main(sys.argv[1])
