"""Decodes from the command line: token ids in, token ids out. `python main.py --help` lists the options."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode_loop import Decoder, Sampling
from decode_loop.record import append_to, follow, play, read_source, self_test

HERE = Path(__file__).parent


def parse() -> argparse.Namespace:
    """The options of the command line."""
    options = argparse.ArgumentParser(description="Token ids in, token ids out.", allow_abbrev=False)
    add = options.add_argument
    add("--model", required=True, help="folder of the model files")
    add("--contract", type=Path, default=HERE / "contract.json", help="default: the one next to this program")
    add("--provider", default="CPUExecutionProvider", help="execution provider of ONNX Runtime")
    add("--capacity", type=int, default=512, help="room in tokens of a cache whose length is chosen")
    add("--prompt", action="append", type=ids, help="ids with commas; once a sequence")
    add("--source", action="append", help="what the encoder reads: ids, once a sequence; or a file of float32")
    add("--source-shape", type=ids, help="the shape of what that file holds, with commas")
    add("--most", type=int, default=20, help="the most new tokens")
    add("--stop", type=ids, help="ids that end a sequence, with commas; default: those of the contract")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token, otherwise they are drawn")
    add("--top-k", type=int, default=50, help="draw from so many likeliest tokens; 0 from all")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest ones of this probability")
    add("--min-p", type=float, default=0.0, help="leave out tokens below this part of the likeliest one's probability")
    add("--repetition-penalty", type=float, default=1.0, help="makes tokens that were there before less likely")
    add("--seed", type=int, default=0, help="of the random numbers")
    add("--follow", action="append", type=ids, help="continue with these ids whatever is likeliest; once a sequence")
    add("--self-test", default="", help="with --follow: also rewind,reorder, and compare")
    add("--record", type=Path, help="play the runs and write what was fed and returned to this file")
    add("--runs", type=Path, default=HERE / "vectors.json", help="the runs; default: those next to this program")
    return options.parse_args()


def ids(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Decode; tokens go to standard output, a line for each sequence, measurements to standard error."""
    given = parse()
    decoder = Decoder(given.model, given.contract, [given.provider], capacity=given.capacity)
    if given.record is not None:
        return 1 if play(decoder, given.runs, given.record) else 0
    if place := os.environ.get("KVDOCTOR_TRACE"):
        decoder.trace = append_to(place)
    if not given.prompt:
        raise ValueError("give --prompt, once for each sequence")
    began, times = time.perf_counter(), list[float]()
    if decoder.contract.source is not None:
        decoder.encode(*read_source(source_of(given), Path()))
    if given.follow:
        made = follow(decoder, given.prompt, given.follow)
        for name in filter(None, given.self_test.split(",")):
            self_test(decoder, name, given.follow, made)
    else:
        made = generate(decoder, given, times)
    for row in made:
        print(",".join(map(str, row)))
    if times:
        print(measured(began, times), file=sys.stderr)
    return 0


def generate(decoder: Decoder, given: argparse.Namespace, times: list[float]) -> list[list[int]]:
    """Decode freely; `times` takes the moment of each step."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = Sampling(**{name: getattr(given, name) for name in names})
    made: list[list[int]] = [[] for _ in given.prompt]
    for tokens in decoder.stream(given.prompt, given.most, given.stop, sampling.chooser()):
        times.append(time.perf_counter())
        for row, token in zip(made, tokens, strict=True):
            row.extend([] if token is None else [token])
    return made


def source_of(given: argparse.Namespace) -> Any:
    """The source as `vectors.json` has it: ids of each sequence, or a file with its shape."""
    if not given.source:
        raise ValueError("give --source: this model reads it with its encoder")
    if given.source_shape is not None:
        return {"file": given.source[0], "shape": given.source_shape}
    return [ids(text) for text in given.source]


def measured(began: float, times: Sequence[float]) -> str:
    """The time to the first token, and the rate of those after it."""
    rate = (len(times) - 1) / (times[-1] - times[0]) if times[-1] > times[0] else 0.0
    return f"first token {(times[0] - began) * 1000:.1f} ms, {rate:.1f} tokens/s"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as wrong:  # of the arguments, of the model, or of the runtime
        sys.exit(f"error: {wrong}")
