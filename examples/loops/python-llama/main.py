"""Decodes from the command line: token ids in, token ids out. `python main.py --help` lists the options."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from loop import Array, Decoder

RUN = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
RUN.add_argument("--prompt", action="append", help="ids with commas; once a sequence")
RUN.add_argument("--follow", action="append", help="continue with these ids whatever is likeliest; once a sequence")
RUN.add_argument("--self-test", default="", help="with --follow: also rewind,reorder, and compare")

OPTIONS = argparse.ArgumentParser(description="Token ids in, token ids out.", parents=[RUN], allow_abbrev=False)
OPTIONS.add_argument("--model", required=True, help="folder of the model files")
OPTIONS.add_argument("--provider", default="CPUExecutionProvider", help="execution provider of ONNX Runtime")
OPTIONS.add_argument("--most", type=int, default=20, help="the most new tokens")
OPTIONS.add_argument("--stop", default="", help="ids that end a sequence, with commas")
OPTIONS.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, otherwise sampled")
OPTIONS.add_argument("--top-k", type=int, default=50, help="sample from so many tokens")
OPTIONS.add_argument("--seed", type=int, default=0, help="of the sampling")
OPTIONS.add_argument("--probe", help="file of runs, one a line, as `kvdoctor probe` writes it")
OPTIONS.add_argument("--result", default="result.jsonl", help="with --probe: the file to write for `kvdoctor judge`")


def main() -> int:
    """Decode; tokens go to standard output, a line for each sequence, measurements to standard error."""
    given = OPTIONS.parse_args()
    if given.top_k < 1 or not given.temperature >= 0:
        raise ValueError("--top-k is 1 or more, --temperature 0 or more")
    if given.provider not in (known := ort.get_available_providers()):
        raise ValueError(f"there is no provider {given.provider!r} here; there is {', '.join(known)}")
    decoder = Decoder(given.model, [given.provider])
    if given.probe:
        return probe(decoder, Path(given.probe), given.result)
    began, times = time.perf_counter(), list[float]()

    def on_token(_row: int, _token: int) -> None:
        times.append(time.perf_counter())

    if given.follow:
        made = follow(decoder, given, times)
    else:
        choose = sampler(given.temperature, given.top_k, given.seed) if given.temperature > 0 else None
        made = decoder.generate(prompts_of(given), given.most, ids(given.stop), choose, on_token)
    for row in made:
        print(",".join(map(str, row)))
    if times:
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        first = (times[0] - began) * 1000
        print(f"first token {first:.1f} ms, {rate:.1f} tokens/s{peak_memory()}", file=sys.stderr)
    return 0


def probe(decoder: Decoder, file: Path, result: str) -> int:
    """Run each line of a file, and write what was fed and got for `kvdoctor judge`; 1 where a run went wrong."""
    options = argparse.ArgumentParser(parents=[RUN], allow_abbrev=False)
    options.add_argument("--run", required=True)
    options.add_argument("--expect", action="append", default=[])
    runs = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not runs or Path(result).resolve() == file.resolve():
        raise ValueError(f"{file} has no run" if not runs else "--result is the file of --probe itself")
    wrong = 0
    with Path(result).open("w", encoding="utf-8") as lines:

        def write(entry: Mapping[str, Any]) -> None:
            print(json.dumps(entry), file=lines, flush=True)

        for line in runs:
            words = line.split(" ")
            # A value may begin with a minus sign, which looks like an option.
            given = options.parse_args([f"{name}={value}" for name, value in zip(words[::2], words[1::2], strict=True)])
            decoder.reset()
            decoder.trace = partial(_named, given.run, write)
            made, error = list[list[int]](), None
            try:
                made = follow(decoder, given, [])
            except Exception as failed:  # the next runs say more
                error = str(failed)
            write({"run": given.run, "tokens": made, "error": error})
            problem = f"error: {error}" if error else difference(made, [ids(text) for text in given.expect])
            wrong += problem is not None
            print(f"{given.run}: {problem or 'as expected'}", flush=True)
    return 1 if wrong else 0


def _named(run: str, write: Callable[[Mapping[str, Any]], None], entry: Mapping[str, Any]) -> None:
    write({"run": run, **entry})


def difference(made: list[list[int]], expected: list[list[int]]) -> str | None:
    """The first token that is not the expected one; -1 expects nothing."""
    for row, (tokens, wanted) in enumerate(zip(made, expected, strict=True)):
        for step, (token, due) in enumerate(zip(tokens, wanted, strict=True)):
            if due not in (-1, token):
                return f"sequence {row}, step {step}: token {token} in place of {due}"
    return None


def ids(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",") if part]


def prompts_of(given: argparse.Namespace) -> list[list[int]]:
    """The prompts that were given."""
    if not given.prompt:
        raise ValueError("give --prompt, once for each sequence")
    return [ids(text) for text in given.prompt]


def follow(decoder: Decoder, given: argparse.Namespace, times: list[float]) -> list[list[int]]:
    """The likeliest token after the prompt and after each given one, whatever was likeliest before."""
    logits = decoder.prefill(prompts_of(given))
    made = [[int(row.argmax())] for row in logits]
    times.append(time.perf_counter())
    rows = [ids(text) for text in given.follow or []]
    for step in zip(*rows, strict=True):
        logits = decoder.step([[token] for token in step])
        times.append(time.perf_counter())
        for row, likeliest in enumerate(logits.argmax(-1)):
            made[row].append(int(likeliest))
    if given.self_test:
        self_test(decoder, given.self_test.split(","), rows, made)
    return made


def self_test(decoder: Decoder, wanted: list[str], given: list[list[int]], made: list[list[int]]) -> None:
    """Take the last step again after going back, and after changing rows: the likeliest tokens must be the same.

    Raises:
        ValueError: they are not.
    """
    if not all(given):
        raise ValueError("--self-test needs tokens to --follow")
    if unknown := set(wanted) - {"rewind", "reorder"}:
        raise ValueError(f"--self-test knows rewind and reorder, not {', '.join(sorted(unknown))}")
    last, expected = [[row[-1]] for row in given], [row[-1] for row in made]
    if "rewind" in wanted:
        decoder.rewind(1)
        compare("rewind", decoder.step(last), expected)
    if "reorder" in wanted:
        decoder.rewind(1)
        order = [*reversed(range(len(given))), 0]  # the rows backwards, and the first one once more
        decoder.reorder(order)
        compare("reorder", decoder.step([last[row] for row in order]), [expected[row] for row in order])


def compare(name: str, logits: Array, expected: list[int]) -> None:
    """Raise a ValueError where other tokens are likeliest."""
    got = [int(row.argmax()) for row in logits]
    if got != expected:
        raise ValueError(f"{name}: {got} in place of {expected}")


def sampler(temperature: float, top_k: int, seed: int):
    """A function that picks a token from the `top_k` likeliest, by their probabilities at a temperature."""
    random = np.random.default_rng(seed)

    def choose(logits: Array) -> int:
        likeliest = np.argsort(logits)[-top_k:]
        weights = np.exp((logits[likeliest] - logits[likeliest[-1]]) / temperature)
        return int(random.choice(likeliest, p=weights / weights.sum()))

    return choose


def peak_memory() -> str:
    """`, peak memory N MiB`, the largest resident memory of this process so far; empty where it is unknown."""
    status = Path("/proc/self/status")  # what the resource module tells includes the parent process
    if not status.is_file():
        return ""
    (line,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
    return f", peak memory {int(line.split()[1]) >> 10} MiB"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception as wrong:  # of the arguments, of the model, or of the runtime
        sys.exit(f"error: {wrong}")
