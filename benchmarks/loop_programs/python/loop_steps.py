"""Steps of the written loop: `python loop_steps.py MODEL PROMPT STEPS`, in the folder of the project.

Each line of standard input is a number of steps to take; a line says when they are taken.
"""

import sys

import onnxruntime as ort
from decode_loop import Decoder

model, prompt, _ = sys.argv[1:]
options = ort.SessionOptions()
options.intra_op_num_threads = 1
decoder = Decoder(model, "contract.json", options=options)
logits = decoder.prefill([list(range(1, int(prompt) + 1))])
print("ready", flush=True)
for line in sys.stdin:
    for _ in range(int(line)):
        logits = decoder.step([[int(logits[0].argmax())]])
    print("done", flush=True)
