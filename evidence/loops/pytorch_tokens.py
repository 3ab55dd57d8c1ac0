"""Decodes greedily with PyTorch's `generate`, inside an exporter's environment: CHECKPOINT LOOP [CHECKPOINT LOOP ...].

LOOP is the folder of a written loop, whose first run has the prompt and the source. The last line of the output has
the new tokens of each pair as JSON, without the one that ended them.
"""

import json
import sys
from pathlib import Path

MOST = 12
"""New tokens."""


def decode(checkpoint: str, loop: Path) -> list[int]:
    """The likeliest tokens after the prompt of a loop's first run."""
    import numpy as np
    import torch
    import transformers
    from transformers.modeling_outputs import BaseModelOutput

    calls = {call["call"]: call for call in json.loads((loop / "vectors.json").read_text())["runs"][0]["calls"]}
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model = getattr(transformers, config.architectures[0]).from_pretrained(checkpoint).eval()
    prompt = torch.tensor(calls["prefill"]["rows"])
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    if source := calls.get("encode-file"):
        given = torch.from_numpy(np.fromfile(loop / source["file"], "<f4").reshape(source["shape"]))
        states = json.loads((loop / "contract.json").read_text())["calls"]["encode"] == []
        encoded = {"encoder_outputs": BaseModelOutput(given)} if states else {model.main_input_name: given}
        inputs = {**encoded, "decoder_input_ids": prompt}
    elif source := calls.get("encode"):
        ids = torch.tensor(source["rows"])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": prompt}
    with torch.inference_mode():  # by the method of all models: that of Whisper cuts the sound into windows
        made = transformers.GenerationMixin.generate(
            model,
            **inputs,
            decoder_start_token_id=int(prompt[0, 0]),  # another one would be put before the prompt
            do_sample=False,
            num_beams=1,
            max_new_tokens=MOST,
        )
    tokens = made[0, prompt.shape[1] :].tolist()
    ends = model.generation_config.eos_token_id
    return [token for token in tokens if token not in (ends if isinstance(ends, list) else [ends])]


if __name__ == "__main__":
    pairs = zip(sys.argv[1::2], sys.argv[2::2], strict=True)
    print(json.dumps([decode(checkpoint, Path(loop)) for checkpoint, loop in pairs]))
