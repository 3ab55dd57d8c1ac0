"""What a gate is asked to do."""

from dataclasses import dataclass

from kvdoctor.options import Options


@dataclass(frozen=True, slots=True)
class Job:
    """One model, as the user wrote its path, and what holds for it."""

    path: str
    options: Options
