"""Generates tokens with onnxruntime-genai, greedily: `python generate_with_genai.py JSON`. Run as a script.

The only argument is a JSON object: `model`, the folder with genai_config.json; `prompts`, lists of token ids; `counts`,
how many tokens to generate from each; `out`, an .npz file to leave the logits in, `logits.N` float[tokens, vocabulary]
of prompt N; for a model with an encoder `features`, an .npz file with what it is fed for prompt N as `N`, and
`features_as`, the name of that input. Each line of standard output is a JSON object: the versions of the libraries,
then `tokens`, a list for each prompt, which ends early with a token that ends a text, or `failed` with the reason.
"""

import json
import sys
from importlib import metadata
from typing import Any

import numpy as np
import onnxruntime_genai as og

MOST_WORDS = 400


def generate(model: Any, prompt: list[int], count: int, given: dict[str, Any]) -> tuple[list[int], Any]:
    """The tokens after a prompt, and the row of logits that each was chosen from; `given` are inputs by name."""
    parameters = og.GeneratorParams(model)
    parameters.set_search_options(do_sample=False, num_beams=1, max_length=len(prompt) + count)
    generator = og.Generator(model, parameters)
    for name, value in given.items():
        generator.set_model_input(name, value)
    generator.append_tokens(np.array([prompt], dtype=np.int32))
    tokens: list[int] = []
    rows = []
    while len(tokens) < count and not generator.is_done():
        generator.generate_next_token()
        tokens.append(int(generator.get_next_tokens()[0]))
        logits = np.asarray(generator.get_output("logits"), dtype=np.float32)
        rows.append(logits.reshape(-1, logits.shape[-1])[-1])
    return tokens, np.array(rows)


def main() -> None:
    """Answer the request."""
    asked = json.loads(sys.argv[1])
    names = ("onnxruntime-genai", "onnxruntime", "numpy")
    print(json.dumps({name: metadata.version(name) for name in names}), flush=True)
    if hasattr(og, "disable_telemetry_events"):
        og.disable_telemetry_events()
    try:
        model = og.Model(asked["model"])
        features = np.load(asked["features"]) if "features" in asked else {}
        given = [{asked["features_as"]: features[str(n)]} if features else {} for n in range(len(asked["prompts"]))]
        done = [generate(model, *request) for request in zip(asked["prompts"], asked["counts"], given, strict=True)]
        np.savez(asked["out"], **{f"logits.{number}": rows for number, (_, rows) in enumerate(done)})
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(json.dumps({"failed": text[:MOST_WORDS]}), flush=True)
        return
    print(json.dumps({"tokens": [tokens for tokens, _ in done]}), flush=True)


if __name__ == "__main__":
    main()
