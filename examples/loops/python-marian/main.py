"""Decodes from the command line: token ids in, token ids out. `python main.py --help` lists the options."""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from loop import Array, Decoder

OPTIONS = argparse.ArgumentParser(description="Token ids in, token ids out.")
OPTIONS.add_argument("--model", required=True, help="folder of the model files")
OPTIONS.add_argument("--prompt", action="append", required=True, help="ids with commas; once a sequence")
OPTIONS.add_argument("--source", action="append", required=True, help="ids for the encoder; once a sequence")
OPTIONS.add_argument("--most", type=int, default=20, help="the most new tokens")
OPTIONS.add_argument("--stop", default="", help="ids that end a sequence, with commas")
OPTIONS.add_argument("--follow", action="append", help="continue with these ids whatever is likeliest; once a sequence")
OPTIONS.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token, otherwise sampled")
OPTIONS.add_argument("--top-k", type=int, default=50, help="sample from so many tokens")
OPTIONS.add_argument("--seed", type=int, default=0, help="of the sampling")
OPTIONS.add_argument("--self-test", default="", help="with --follow: also rewind,reorder, and compare")


def main() -> None:
    """Decode; tokens go to standard output, a line for each sequence, measurements to standard error."""
    given = OPTIONS.parse_args()
    if given.top_k < 1 or not given.temperature >= 0:
        raise ValueError("--top-k is 1 or more, --temperature 0 or more")
    prompts = [ids(text) for text in given.prompt]
    decoder = Decoder(given.model)
    began = time.perf_counter()
    sources = [ids(text) for text in given.source]
    longest = max(map(len, sources))
    mask = np.array([[1] * len(one) + [0] * (longest - len(one)) for one in sources])
    decoder.encode(np.array([one + [0] * (longest - len(one)) for one in sources]), mask)
    times: list[float] = []

    def on_token(_row: int, _token: int) -> None:
        times.append(time.perf_counter())

    if given.follow:
        made = follow(decoder, prompts, [ids(text) for text in given.follow], times)
        if given.self_test:
            self_test(decoder, given.self_test.split(","), [ids(text) for text in given.follow], made)
    else:
        choose = sampler(given.temperature, given.top_k, given.seed) if given.temperature > 0 else None
        made = decoder.generate(prompts, given.most, ids(given.stop), choose, on_token)
    for row in made:
        print(",".join(map(str, row)))
    if times:
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        first = (times[0] - began) * 1000
        print(f"first token {first:.1f} ms, {rate:.1f} tokens/s, peak memory {peak_mib()} MiB", file=sys.stderr)


def ids(text: str) -> list[int]:
    """Integers with commas between them."""
    return [int(part) for part in text.split(",") if part]


def follow(decoder: Decoder, prompts: list[list[int]], given: list[list[int]], times: list[float]) -> list[list[int]]:
    """The likeliest token after the prompt and after each given one, whatever was likeliest before."""
    logits = decoder.prefill(prompts)
    made = [[int(row.argmax())] for row in logits]
    times.append(time.perf_counter())
    for step in zip(*given, strict=True):
        logits = decoder.step([[token] for token in step])
        times.append(time.perf_counter())
        for row, likeliest in enumerate(logits.argmax(-1)):
            made[row].append(int(likeliest))
    return made


def self_test(decoder: Decoder, wanted: list[str], given: list[list[int]], made: list[list[int]]) -> None:
    """Take the last step again after going back, and after changing rows: the likeliest tokens must be the same.

    Raises:
        SystemExit: they are not.
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
    """End the program where other tokens are likeliest."""
    got = [int(row.argmax()) for row in logits]
    if got != expected:
        sys.exit(f"{name}: {got} in place of {expected}")


def sampler(temperature: float, top_k: int, seed: int):
    """A function that picks a token from the `top_k` likeliest, by their probabilities at a temperature."""
    random = np.random.default_rng(seed)

    def choose(logits: Array) -> int:
        likeliest = np.argsort(logits)[-top_k:]
        weights = np.exp((logits[likeliest] - logits[likeliest[-1]]) / temperature)
        return int(random.choice(likeliest, p=weights / weights.sum()))

    return choose


def peak_mib() -> int:
    """The largest resident memory of this process so far in MiB; 0 where the system does not tell."""
    status = Path("/proc/self/status")  # what the resource module tells includes the parent process
    if not status.is_file():
        return 0
    (line,) = (line for line in status.read_text(encoding="ascii").splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) >> 10


if __name__ == "__main__":
    try:
        main()
    except Exception as wrong:  # of the arguments, of the model, or of the runtime
        sys.exit(f"error: {wrong}")
