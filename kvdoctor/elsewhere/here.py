"""Where a stack ran first, to hold against what it does elsewhere."""

from dataclasses import dataclass
from pathlib import Path

from kvdoctor.contract import CacheContract
from kvdoctor.runtimes import Runtime


@dataclass(frozen=True, slots=True)
class Here:
    """The runtime of this Python, the contract that it was given, and the file with the logits of its runs."""

    runtime: Runtime
    contract: CacheContract
    logits: Path | None
