"""Decodes from the command line: token ids in, token ids out. `python main.py --help` lists the options."""

import argparse
import sys
import time
from pathlib import Path

from decode_loop import Decoder, Sampling
from decode_loop.record import pad_source, play, read_source, trace_to

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
    add("--record", type=Path, help="write what was fed and returned to this file; without --prompt, of the runs")
    add("--runs", type=Path, default=HERE / "vectors.json", help="the runs; default: those next to this program")
    return options.parse_args()


def ids(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    """Decode; tokens go to standard output, a line for each sequence, measurements to standard error."""
    given = parse()
    decoder = Decoder(given.model, given.contract, [given.provider], capacity=given.capacity)
    if not given.prompt and given.record is not None:
        return 1 if play(decoder, given.runs, given.record) else 0
    if not given.prompt:
        raise ValueError("give --prompt, once for each sequence")
    if given.record is not None:
        trace_to(decoder, given.record.open("w", encoding="utf-8"))
    decode(decoder, given)
    return 0


def decode(decoder: Decoder, given: argparse.Namespace) -> None:
    """Decode the prompts of the command line, and say how long it took."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    sampling = Sampling(**{name: getattr(given, name) for name in names})
    began, times = time.perf_counter(), list[float]()
    if decoder.contract.source is not None:
        if not given.source:
            raise ValueError("give --source: this model reads it with its encoder")
        if given.source_shape:
            decoder.encode(read_source(Path(given.source[0]), given.source_shape))
        else:
            decoder.encode(*pad_source([*map(ids, given.source)]))
    made: list[list[int]] = [[] for _ in given.prompt]
    for tokens in decoder.stream(given.prompt, given.most, given.stop, sampling.chooser()):
        times.append(time.perf_counter())
        for row, token in zip(made, tokens, strict=True):
            row.extend([] if token is None else [token])
    for row in made:
        print(",".join(map(str, row)))
    if times:
        rate = (len(times) - 1) / (times[-1] - times[0]) if times[-1] > times[0] else 0.0
        print(f"first token {(times[0] - began) * 1000:.1f} ms, {rate:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as wrong:  # of the arguments, of the model, or of the runtime
        sys.exit(f"error: {wrong}")
