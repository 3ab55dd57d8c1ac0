"""Answers like the script with PyTorch, without one: the logits that it is sent, as the config of the checkpoint says.

`add` is added to one logit of the whole sequence, `add_to_loop` to one of the last step, `add_to_longer` to one of the
longer call, `width` cuts the vocabulary.
"""

import json
import sys
from pathlib import Path

import numpy as np

asked = json.loads(sys.argv[1])
wanted = json.loads(Path(asked["checkpoint"], "config.json").read_text(encoding="utf-8"))
print(json.dumps({"torch": "0", "transformers": "0"}), flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if "die" in wanted:
        sys.exit("out of memory, for example")
    if "fail" in wanted:
        print(json.dumps({"failed": wanted["fail"]}), flush=True)
        continue
    if "modules" in question:  # it has none
        np.savez(question["out"], names=np.array([], np.str_), classes=np.array([], np.str_))
        print(json.dumps({"model": "MadeUp", "torch": "0", "transformers": "0"}), flush=True)
        continue
    with np.load(question["feeds"]) as file:
        steps = {name.removeprefix(question["prefix"]): file[name] for name in file.files}
    wholes = int(steps["wholes"])
    logits = [steps[f"step.{number}"] for number in range(sum(name.startswith("step.") for name in steps))]
    more = {}
    if steps["tokens"].shape[1] > int(steps["total"]):
        more["longer"] = logits.pop() + wanted.get("add_to_longer", 0) * np.eye(1, logits[0].shape[2])
    loop = np.concatenate(logits[wholes:], axis=1)
    whole = logits[0] if wholes else loop.copy()
    whole[0, 4, 2] += wanted.get("add", 0)
    loop[0, -1, 2] += wanted.get("add", 0) + wanted.get("add_to_loop", 0)
    width = wanted.get("width", whole.shape[2])
    np.savez(question["out"], whole=whole[:, :, :width], loop=loop[:, :, :width], **more)
    print(json.dumps({"model": "MadeUp", "torch": "0", "transformers": "0"}), flush=True)
