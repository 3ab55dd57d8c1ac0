"""What an export made afresh should be: what the user asked for, and what is known of the sick model it replaces."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """One thing that was chosen for an export, and why."""

    what: str
    value: str
    because: str


@dataclass(frozen=True, slots=True)
class Sick:
    """What is known of the model that an export replaces; all empty where there is none.

    `name` is what it is called, `layouts` those of its stacks, `roles` the parts its files play, `opset` the newest
    that one of them imports, `dtype` that of its cache, `faults` the checks that fired as warnings or errors.
    """

    name: str = ""
    layouts: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    opset: int | None = None
    dtype: str | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for, None where it was left open; `uses` are those that must work."""

    checkpoint: str
    exporter: str | None = None
    opset: int | None = None
    dtype: str | None = None
    task: str | None = None
    uses: tuple[str, ...] = ()
    sick: Sick = field(default_factory=Sick)
