"""Writes docs/experiments.md from the experiments themselves: `python docs/make_experiments.py`."""

from pathlib import Path

from kvdoctor.decode.experiments import Experiment, find_explaining, load

HEAD = """# The experiments

What a step-test runs, in this order. Made from `kvdoctor/decode/experiments/` by `python docs/make_experiments.py`. An
experiment is left out, with its reason, where the contract does not allow it. *With a fault*: only where
an experiment named in the last column went wrong, to find the cause. No finding is based on a *workaround*.

| experiment | what is run | when | the use that it tries (`--require`), or its purpose |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(map(row, load()))


def row(one: Experiment) -> str:
    """The line of one experiment."""
    if one.explains:
        when, purpose = "with a fault", "explains " + ", ".join(one.explains)
    elif one.on_request:
        commands = {"reference": "`--reference`", "loop": "`kvdoctor loop`", "generate": "`convert --layout genai`"}
        when, purpose = commands[one.on_request], one.why
    else:
        when = "`--thorough`" if one.thorough else "default"
        if one.unless_passed:
            when += f", unless {one.unless_passed} passed"
        if one.lengths:
            when += ", unless proved"
        purpose = describe_use(one)
    return f"| {one.name} | {one.question} | {when} | {purpose} |\n"


def describe_use(one: Experiment) -> str:
    """What the last column says of an experiment that is run without a fault."""
    if not one.judged:
        return f"workaround: {one.why}" if one.why else "workaround"
    if one.use is None:
        return "–"
    required = f" (`{one.use.required}`)" if one.use.required else ""
    why = find_explaining(one.name)
    return one.use.words + required + (f"; explained by {why}" if why else "")


if __name__ == "__main__":
    Path(__file__).with_name("experiments.md").write_text(page(), encoding="utf-8")
