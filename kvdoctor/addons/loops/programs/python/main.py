"""Decodes from the command line: token ids in, token ids out. `python main.py --help` lists the options."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from decode_loop import Decoder
from decode_loop.record import check_calls, make, play, trace_to

HERE = Path(__file__).parent


def main() -> bool:
    """Make calls and print the tokens of each sequence, or play runs; whether all tokens are as expected."""
    options = argparse.ArgumentParser(description="Token ids in, token ids out.", allow_abbrev=False)
    add = options.add_argument
    add("--model", required=True, help="folder of the model files")
    add("--contract", type=Path, default=HERE / "contract.json", help="default: the one next to this program")
    add("--provider", default="CPUExecutionProvider", help="execution provider of ONNX Runtime")
    add("--calls", help='calls as JSON: [{"call": "generate", "rows": [[5, 6, 7]], "most": 20}]')
    add("--runs", type=Path, default=HERE / "vectors.json", help="without --calls: runs to play; default: as above")
    add("--record", type=Path, help="write what was fed and returned to this file, a trace")
    given = options.parse_args()
    try:
        calls = None if given.calls is None else check_calls(json.loads(given.calls))
    except ValueError as wrong:
        options.error(f"--calls does not give calls as JSON: {wrong}")
    decoder = Decoder(given.model, given.contract, [given.provider])
    with given.record.open("w", encoding="utf-8") if given.record else contextlib.nullcontext() as lines:
        if calls is None:
            return play(decoder, given.runs, lines)
        if lines is not None:
            trace_to(decoder, lines)
        for call in calls:
            for row in make(decoder, call):
                print(",".join(map(str, row)))
    return True


if __name__ == "__main__":
    try:
        sys.exit(0 if main() else 1)
    except Exception as wrong:  # of the arguments, of the model, or of the runtime
        sys.exit(f"error: {wrong}")
