"""Examples under the `--help` of each command: what it is called with, and what for."""

import click

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "inspect": (
        ("kvdoctor inspect exports/marian", "files, inputs, outputs, the cache contract"),
        ("kvdoctor inspect exports/llama --context 8192 --batch 4", "what the cache takes"),
        ("kvdoctor inspect exports/marian --target onnxruntime==1.16.3", "what is too new for it"),
    ),
    "step-test": (
        ("kvdoctor step-test exports/marian", "what fails, where, why"),
        ("kvdoctor step-test exports/marian --consumer held", "as Optimum calls it"),
        ("kvdoctor step-test exports/llama --require batch,left-padding", "uses that must work"),
        ("kvdoctor step-test exports/llama --trace loop.jsonl", "your own loop"),
    ),
    "re-export": (
        ("kvdoctor re-export exports/marian -o fixed", "a repaired and proved copy"),
        ("kvdoctor re-export exports/marian --diff", "what would change, node by node"),
        ("kvdoctor re-export exports/marian -o fixed --target onnxruntime==1.16.3", "for an older runtime"),
        ("kvdoctor re-export exports/marian --from checkpoints/marian -o fresh", "exported afresh"),
    ),
    "repro": (("kvdoctor repro exports/marian -o to-send", "the failure without the weights"),),
    "gate": (
        ("kvdoctor gate exports/*/", "every model, one verdict"),
        ("kvdoctor gate exports/*/ --output sarif=kvdoctor.sarif -q", "with a file for code scanning"),
        ("kvdoctor gate exports/marian --fail-on warning", "stricter"),
        ("kvdoctor gate --static --by-folder exports/marian/model.onnx", "for a hook: runs nothing"),
    ),
    "baseline": (
        ('kvdoctor baseline exports/*/ --reason "the app holds it" --until 2027-03-31', "take in what counts today"),
        ("kvdoctor baseline exports/*/ --prune", "take out what is not found any more"),
        ("kvdoctor baseline exports/*/ --check", "for CI: is the file up to date?"),
    ),
    "config": (
        ("kvdoctor config", "what holds for the models of the policy, and where it comes from"),
        ("kvdoctor config exports/marian --format json", "for one model, for programs"),
    ),
    "explain": (
        ("kvdoctor explain KV203", "by code"),
        ("kvdoctor explain mask-not-offset", "by name"),
        ("kvdoctor explain", "all of them"),
    ),
    "contract": (
        ("kvdoctor contract exports/marian", "what a loop must feed, feed back and hold"),
        ("kvdoctor contract exports/marian --format json", "for programs"),
    ),
    "schema": (("kvdoctor schema report", "what `--format json` holds"),),
    "env": (("kvdoctor env", "to paste into a bug report"),),
}


def show(group: click.Group) -> None:
    """Put the examples under the help of the group's commands, where a command does not bring its own."""
    for name, command in group.commands.items():
        if command.epilog is None and name in EXAMPLES:
            command.epilog = text(EXAMPLES[name])


def text(examples: tuple[tuple[str, str], ...]) -> str:
    """The calls with what they are for, on one line where that fits into 80 columns, which click leaves as they are."""
    width = max(len(call) for call, _ in examples)
    beside = all(width + 4 + len(purpose) <= 78 for _, purpose in examples)
    lines = (f"  {call:<{width}}  {purpose}" if beside else f"  {call}\n      {purpose}" for call, purpose in examples)
    return "Examples:\n\n\b\n" + "\n".join(lines)
