"""What the user asked for, the same for every command."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdoctor.child import Limits
from kvdoctor.choices import Consumer, FailOn, Required
from kvdoctor.findings import Selection
from kvdoctor.kept import Load
from kvdoctor.plain import to_plain
from kvdoctor.targets import Target


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, the same for every command.

    `locate` says that the place of a fault is looked for in the graph, which takes as long again; `only` names
    the stacks that are to be run, of those that lie at the path. `tolerances` are shares of the spread that pass in the
    place of kvdoctor's own, by the arithmetic; `policy` is the file that holds what was not said, if there is one.
    """

    consumer: Consumer = "plain"
    fail_on: FailOn = "error"
    selection: Selection = field(default_factory=Selection)
    seed: int = 0
    provider: str = "CPUExecutionProvider"
    limits: Limits = field(default_factory=Limits)
    hash_files: bool = False
    contract: str | None = None
    required: tuple[Required, ...] = ()
    thorough: bool = False
    trace: str | None = None
    prompt: tuple[int, ...] = ()
    inputs: str | None = None
    reference: str | None = None
    offline: bool = False
    load: Load = field(default_factory=Load)
    locate: bool = True
    only: frozenset[str] | None = None
    targets: tuple[Target, ...] = ()
    progress: Callable[[str, int, int], None] | None = None
    tolerances: Mapping[str, float] = field(default_factory=dict)
    policy: str | None = None

    def as_arguments(self) -> dict[str, Any]:
        """The options as the report shows them; what the memory is planned for only where it was asked."""
        load = {name: number for name, number in to_plain(self.load).items() if number is not None}
        return {
            "consumer": self.consumer,
            "fail_on": self.fail_on,
            "select": list(self.selection.select),
            "ignore": list(self.selection.ignore),
            "provider": self.provider,
            **({"contract": self.contract} if self.contract is not None else {}),
            **({"require": list(self.required)} if self.required else {}),
            **({"thorough": True} if self.thorough else {}),
            **({"trace": self.trace} if self.trace is not None else {}),
            **({"prompt_ids": list(self.prompt)} if self.prompt else {}),
            **({"inputs": self.inputs} if self.inputs is not None else {}),
            **({"reference": self.reference} if self.reference is not None else {}),
            **({"offline": self.offline} if self.reference is not None or self.targets else {}),
            **({"target": [target.asked for target in self.targets]} if self.targets else {}),
            **({"tolerances": dict(self.tolerances)} if self.tolerances else {}),
            **({"policy": self.policy} if self.policy is not None else {}),
            **load,
        }
