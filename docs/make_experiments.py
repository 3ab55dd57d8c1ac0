"""Writes docs/experiments.md from the experiments themselves: `python docs/make_experiments.py`."""

import importlib
import pkgutil
from pathlib import Path

from kvdoctor.decode import experiments
from kvdoctor.decode.experiments import Experiment, find_explaining, load

HEAD = """# The experiments

What a step-test runs, in this order. Made from `kvdoctor/decode/experiments/` by `python docs/make_experiments.py`.
An experiment is left out, with its reason, where the model's contract does not allow it. *With a fault* means: only
where an experiment named in the last column went wrong, to tell why. A *workaround* is what users commonly try; no
finding is based on it.

| experiment | what is run | when | use of the model that it tries (`--require`), or its purpose | file |
| --- | --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page."""
    files = find_files()
    return HEAD + "".join(row(one, files[one.name]) for one in load())


def find_files() -> dict[str, str]:
    """The module that each experiment stands in."""
    names = [module.name for module in pkgutil.iter_modules(experiments.__path__)]
    modules = {name: importlib.import_module(f"{experiments.__name__}.{name}") for name in names}
    return {one.name: f"{name}.py" for name, module in modules.items() for one in getattr(module, "EXPERIMENTS", ())}


def row(one: Experiment, file: str) -> str:
    """The line of one experiment."""
    if one.explains:
        when, purpose = "with a fault", "explains " + ", ".join(one.explains)
    elif one.on_request:
        commands = {"reference": "`--reference`", "loop": "`kvdoctor loop`", "generate": "`re-export --layout genai`"}
        when, purpose = commands[one.on_request], one.why
    else:
        when = "`--thorough`" if one.thorough else "by default"
        if one.unless_passed:
            when += f", unless {one.unless_passed} passed"
        purpose = describe_use(one)
    return f"| {one.name} | {one.question} | {when} | {purpose} | `{file}` |\n"


def describe_use(one: Experiment) -> str:
    """What the last column says of an experiment that is run without a fault."""
    if not one.judged:
        return f"workaround: {one.why}" if one.why else "workaround"
    if one.use is None:
        return "–"
    required = f" (`{one.use.required}`)" if one.use.required else ""
    why = find_explaining(one.name)
    return one.use.words + required + (f"; a difference is explained by {why}" if why else "")


if __name__ == "__main__":
    Path(__file__).with_name("experiments.md").write_text(page(), encoding="utf-8")
