"""Steps of the written loop: `python loop_steps.py MODEL PROMPT STEPS`, in the folder of the project.

Each line of standard input is a number of steps to take; the seconds that they took are printed.
"""

import sys
import time

from decode_loop import Decoder

model, prompt, _ = sys.argv[1:]
decoder = Decoder(model, "contract.json")
logits = decoder.prefill([list(range(1, int(prompt) + 1))])
print("ready", flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    for _ in range(int(line)):
        logits = decoder.step([[int(logits[0].argmax())]])
    print(time.perf_counter() - began, flush=True)
