"""The values that options take: for the command line, for keyword arguments and for a policy.

A `Kind` checks a value, wherever it comes from, and describes the values that it accepts. It knows no single option.
"""

import math
import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, TypeGuard, TypeVar, get_args

from kvdoctor.errors import did_you_mean
from kvdoctor.records import record

Consumer = Literal["plain", "held"]
"""The loop that calls the model: every present is fed back, or the cross-attention cache of the prefill is held."""
Required = Literal["chunked-prefill", "batch", "left-padding", "beam", "full-context", "speculation", "prefix-sharing"]
"""Uses that must work."""
IfConfirmed = Literal["note:confirmed", "warning:confirmed", "error:confirmed"]
IfSuspected = Literal["note:suspected", "warning:suspected", "error:suspected"]
FailOn = Literal["note", "warning", "error", "never", IfConfirmed, IfSuspected]
"""The lowest severity that counts as a failure; with `:confirmed` suspected findings never do, with `:suspected` they
do from one severity lower on, since a suspicion that a run could decide stands one lower than the fault."""
Agree = Literal["tokens", "logits", "bits"]
"""How closely the logits of two models must agree."""
AxisNames = Literal["kept", "readable"]
AttentionOperator = Literal["gqa", "plain"]
"""The operator that computes the attention of a converted model."""
LogitsRows = Literal["last", "selectable"]
"""The rows of logits that a converted model computes."""
CacheType = Literal["float16", "int8", "int4"]
"""The type in which a converted model carries its cache."""
ExporterName = Literal["optimum", "transformers", "genai"]
Fusions = Literal["cpu", "cuda", "webgpu", "dml"]
"""The execution provider whose fused operators the exporter of transformers writes."""
Dtype = Literal["fp32", "fp16", "bf16", "int8", "int4"]

CPU = "CPUExecutionProvider"
"""The execution provider that every runtime has."""
CONSUMERS: tuple[Consumer, ...] = get_args(Consumer)
REQUIRED: tuple[Required, ...] = get_args(Required)
RESTS_ON: dict[Required, Required] = {"speculation": "chunked-prefill", "prefix-sharing": "batch"}
"""Uses that cannot work without another one: whoever requires the first requires the second as well."""
FAIL_ON: tuple[FailOn, ...] = get_args(FailOn)
AGREE: tuple[Agree, ...] = get_args(Agree)
ATTENTION_OPERATORS: tuple[AttentionOperator, ...] = get_args(AttentionOperator)
LOGITS_ROWS: tuple[LogitsRows, ...] = get_args(LogitsRows)
AXIS_NAMES: tuple[AxisNames, ...] = get_args(AxisNames)
CACHE_TYPES: tuple[CacheType, ...] = get_args(CacheType)
EXPORTERS: tuple[ExporterName, ...] = get_args(ExporterName)
FUSIONS: tuple[Fusions, ...] = get_args(Fusions)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

T = TypeVar("T")


class WrongValue(ValueError):
    """An option does not accept a value; the text is the reason."""


@record
class Kind:
    """The values of an option: any value at all.

    `takes` describes them for messages and for docs/policy.md, `metavar` stands for one in the help, and `limits` are
    the bounds that the help names.
    """

    takes: str
    metavar: str = ""
    limits: str = ""

    def read(self, given: Any) -> Any:
        """Check a keyword argument, and return the value of the option.

        Raises:
            WrongValue: it is none; the text is the reason.
        """
        return given

    def parse(self, text: str) -> Any:
        """Read an argument of the command line. Raises WrongValue: it is no value of this kind."""
        return self.read(text)

    def check_toml(self, given: Any) -> None:
        """Check a value of a policy, which is stricter about types than a keyword argument.

        Raises:
            WrongValue: it is no value of this kind.
        """
        self.read(given)

    def to_plain(self, value: Any) -> Any:
        """Return the value of the option as JSON holds it."""
        return value

    def words(self) -> Iterable[str]:
        """Return the texts that it accepts, for completion in a shell; none where they cannot be listed."""
        return ()

    def refuse(self, given: Any) -> NoReturn:
        """Raise `WrongValue` with the values that are accepted."""
        raise WrongValue(f"it takes {self.takes}; got {given!r}")

    def convert(self, into: Callable[[Any], T], given: Any) -> T:
        """Return what a function makes of a value, and refuse the value where that fails."""
        try:
            return into(given)
        except (TypeError, ValueError):
            self.refuse(given)


@record
class Flag(Kind):
    """A switch."""

    takes: str = "true or false"

    def read(self, given: Any) -> bool:
        """Accept a Boolean."""
        return given if type(given) is bool else self.refuse(given)


@record
class Choice(Kind):
    """One of a few names."""

    values: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: tuple[str, ...]) -> "Choice":
        """Make the kind of these names."""
        *first, last = (f'"{value}"' for value in values)
        takes = f"{', '.join(first)} or {last}" if first else last
        return cls(takes, f"[{'|'.join(values)}]", values=values)

    def read(self, given: Any) -> str:
        """Accept one of the names."""
        if isinstance(given, str) and given in self.values:
            return given
        meant = did_you_mean(str(given), self.values)
        raise WrongValue(f"it takes {self.takes}; got {given!r}{'; ' if meant else ''}{meant}")

    def words(self) -> tuple[str, ...]:
        """Return the names."""
        return self.values


@record
class Whole(Kind):
    """A whole number within bounds."""

    least: int = 0
    most: int | None = None

    @classmethod
    def of(cls, least: int, most: int | None = None, *, unit: str = "", metavar: str = "N") -> "Whole":
        """Make the kind of the numbers from `least` to `most`, both included, or without an upper bound."""
        limits = f"{least} or more" if most is None else f"{least} to {most}"
        return cls(f"a whole number{f' of {unit}' if unit else ''}, {limits}", metavar, limits, least, most)

    def read(self, given: Any) -> int:
        """Accept an integer that is no Boolean."""
        if type(given) is not int or given < self.least or (self.most is not None and given > self.most):
            self.refuse(given)
        return given

    def parse(self, text: str) -> int:
        """Read the digits."""
        return self.read(self.convert(int, text))


@record
class Seconds(Kind):
    """A duration."""

    takes: str = "a number of seconds above 0"
    metavar: str = "SECONDS"
    limits: str = "above 0"

    def read(self, given: Any) -> float:
        """Accept a finite number; `nan` and `inf` would be no limit at all."""
        if type(given) not in (int, float) or not 0 < given < math.inf:
            self.refuse(given)
        return float(given)

    def parse(self, text: str) -> float:
        """Read a decimal number."""
        return self.read(self.convert(float, text))


@record
class Text(Kind):
    """A text that is not blank."""

    takes: str = "a text"
    metavar: str = "TEXT"

    def read(self, given: Any) -> str:
        """Accept a text."""
        return given if is_text(given) else self.refuse(given)


@record
class Day(Kind):
    """A day of the calendar."""

    takes: str = "a date, as in 2026-12-31"
    metavar: str = "DATE"

    def read(self, given: Any) -> str:
        """Accept a text of the form YYYY-MM-DD."""
        import datetime as dt

        day = self.convert(dt.date.fromisoformat, given).isoformat()
        return day if day == given else self.refuse(given)


@record
class File(Kind):
    """The path of a file or a model that is read."""

    takes: str = "the path of a file"
    metavar: str = "FILE"

    def read(self, given: Any) -> str:
        """Accept a text or an `os.PathLike`."""
        return self.convert(os.fsdecode, given)

    def check_toml(self, given: Any) -> None:
        """Accept a text."""
        if not is_text(given):
            self.refuse(given)


@record
class Names(Kind):
    """Several names: a list, or one text with commas.

    `make` makes the value of the option from the names; it raises `WrongValue` for an unknown one. `to_json` lists
    the names of a value. `if_empty` is the reason to refuse an entry without a name. `known` lists the names.
    """

    make: Callable[[tuple[str, ...]], Any] = tuple
    to_json: Callable[[Any], list[str]] = list
    if_empty: str = ""
    known: Callable[[], Iterable[str]] = tuple

    def read(self, given: Any) -> Any:
        """Accept a text or an iterable of texts."""
        entries = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else None
        if entries is None:
            self.refuse(given)
        words = [[word.strip() for word in str(entry).split(",") if word.strip()] for entry in entries]
        if not all(words):
            raise WrongValue(self.if_empty or f"it takes {self.takes}; got an empty name")
        return self.make(tuple(word for some in words for word in some))

    def check_toml(self, given: Any) -> None:
        """Accept a list of texts."""
        if not isinstance(given, list) or not all(map(is_text, given)):
            self.refuse(given)
        self.make(tuple(given))

    def words(self) -> Iterable[str]:
        """Return the known names."""
        return self.known()

    def to_plain(self, value: Any) -> list[str]:
        """Return the names."""
        return self.to_json(value)


@record
class Numbers(Kind):
    """Several whole numbers: a list, or one text with commas."""

    takes: str = "whole numbers, as in 1,2,3"
    metavar: str = "IDS"

    def read(self, given: Any) -> tuple[int, ...]:
        """Accept a text or an iterable of integers."""
        try:
            words = given.split(",") if isinstance(given, str) else given
            if isinstance(given, str) and not given.strip(", "):
                self.refuse(given)
            return tuple(int(word) for word in words if str(word).strip())
        except (ValueError, TypeError):
            self.refuse(given)

    def to_plain(self, value: tuple[int, ...]) -> list[int]:
        """Return the numbers."""
        return list(value)


def is_text(value: Any) -> TypeGuard[str]:
    """Return whether a value is a text that is not blank and can be part of a path."""
    return isinstance(value, str) and bool(value.strip()) and "\0" not in value
