"""Decodes greedily with onnxruntime-genai on an export: EXPORT INPUTS.json STEPS. Prints the new tokens as JSON."""

import json
import sys
from pathlib import Path

import onnxruntime_genai as genai

tokens, steps = json.loads(Path(sys.argv[2]).read_text())["input_ids"], int(sys.argv[3])
params = genai.GeneratorParams(genai.Model(sys.argv[1]))
params.set_search_options(max_length=len(tokens) + steps, min_length=len(tokens) + steps, do_sample=False)
generator = genai.Generator(genai.Model(sys.argv[1]), params)
generator.append_tokens(tokens)
for _ in range(steps):
    generator.generate_next_token()
print(json.dumps([int(token) for token in generator.get_sequence(0)][len(tokens) :]))
