"""What each release of onnxruntime takes, measured: the largest IR version and opset, and the operators it lacks.

The numbers are in `limits.json`, which `docs/make_limits.py` writes by opening small models in every release. Standard
library only.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor.records import record

INPUTS = "inputs-"
FILE = Path(__file__).with_name("limits.json")


@record
class ReleaseLimits:
    """One release. `pythons` are versions of Python that it has wheels for and that kvdoctor can run in.

    `unsupported` are names of features, as `TestedOperators` makes them, that a model may not use.
    """

    release: str
    ir: int
    opset: int
    pythons: tuple[str, ...]
    unsupported: frozenset[str]


@record
class TestedOperators:
    """The operators that were tried in every release.

    `since` are the versions of each standard operator that were tried, `contrib` the attributes of each operator of
    other domains, by `DOMAIN:OPERATOR`.
    """

    since: dict[str, tuple[int, ...]]
    contrib: dict[str, tuple[str, ...]]

    def standard(self, operator: str, opset: int) -> str | None:
        """The feature that a standard operator is at an opset: `Attention-23`; None where it was not tried."""
        fitting = [version for version in self.since.get(operator, ()) if version <= opset]
        return f"{operator}-{fitting[-1]}" if fitting else None

    def by_attribute(self, domain: str, operator: str) -> bool:
        """Whether what an operator asks for depends on its attributes or inputs."""
        return bool(self.contrib.get(f"{domain}:{operator}"))

    def other(self, domain: str, operator: str, attributes: set[str], inputs: int) -> tuple[str, ...]:
        """The features that an operator of another domain is: itself, its attributes, the number of its inputs.

        `inputs-9` is one with nine inputs, empty ones counted.
        """
        name = f"{domain}:{operator}"
        if name not in self.contrib:
            return ()
        has = {*attributes, f"{INPUTS}{inputs}"}
        return (name, *(f"{name}.{attribute}" for attribute in self.contrib[name] if attribute in has))


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def releases() -> tuple[str, ...]:
    """The releases that were measured, from old to new."""
    return tuple(_data()["releases"])


@cache
def tested_operators() -> TestedOperators:
    """What was tried."""
    since = {name: tuple(versions) for name, versions in _data()["operators"].items()}
    return TestedOperators(since, {name: tuple(attributes) for name, attributes in _data()["contrib"].items()})


def limits_of(release: str) -> ReleaseLimits | None:
    """What was measured of a release; None beyond what was.

    For a patch release that was not measured, only what holds for all measured patches of its line: some added
    operators.
    """
    line = [name for name in releases() if name.rpartition(".")[0] == release.rpartition(".")[0]]
    rows = [_data()["releases"][name] for name in ([release] if release in line else line)]
    if not rows:
        return None
    return ReleaseLimits(
        release=release,
        ir=max(row["ir"] for row in rows),
        opset=max(row["opset"] for row in rows),
        pythons=tuple(rows[-1]["pythons"]),
        unsupported=frozenset(rows[0]["unsupported"]).intersection(*(row["unsupported"] for row in rows)),
    )


def newest_limits() -> ReleaseLimits:
    """The newest release that was measured."""
    found = limits_of(releases()[-1])
    assert found is not None  # noqa: S101 - it is in the table
    return found


def describe_feature(feature: str) -> str:
    """`Attention-23` as `Attention of opset 23`, `com.microsoft:GroupQueryAttention.softcap` as its attribute."""
    domain, _, name = feature.rpartition(":")
    if not domain:
        operator, _, since = name.rpartition("-")
        return f"{operator} of opset {since}"
    operator, _, attribute = name.partition(".")
    whole = operator if domain == "ai.onnx" else f"{domain} {operator}"
    if attribute.startswith(INPUTS):
        return f"{whole} with {attribute.removeprefix(INPUTS)} inputs"
    return f"attribute {attribute} of {whole}" if attribute else whole


def operator_of(feature: str) -> str:
    """The operator that a feature belongs to: of an attribute the operator, of an operator itself."""
    domain, separator, name = feature.rpartition(":")
    return f"{domain}{separator}{name.partition('.')[0]}"
