"""The errors of kvdoctor, and the hints in their messages. Each says what is wrong, where, and what to do next."""

import os
import re
import shlex
from collections.abc import Iterable
from errno import ENOMEM


class KvdoctorError(Exception):
    """Root of all errors that kvdoctor raises on purpose; the command line turns it into exit code 2."""


class UsageError(KvdoctorError):
    """The call cannot be carried out as asked: a path that is not there, an OUT that exists, a bad option."""


class UnreadableError(KvdoctorError):
    """A file is not a readable ONNX model. `reason` names the kind of damage.

    The doctor turns it into the finding `unreadable`: a damaged file is a result, not a crash.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.advice = advice


class RuntimeUnavailable(KvdoctorError):
    """ONNX Runtime cannot be started here, so nothing can be run; the command line ends with exit code 3."""


class WorkerDied(KvdoctorError):
    """The process that runs the model ended before it answered. `how` says by which signal or limit."""

    def __init__(self, how: str, limit: str | None = None) -> None:
        super().__init__(how)
        self.how = how
        self.limit = limit


class Unhealthy(KvdoctorError):
    """A model was not shown to be healthy: `raise_for_findings` of its report raises it, with the findings as text."""


class Worse(KvdoctorError):
    """One model is worse than another, or they could not be compared: `raise_if_worse` of a diff raises it."""


def lacks_memory(error: BaseException) -> bool:
    """Whether no memory is left: Python has no type of its own for a thread that it cannot start."""
    no_thread = type(error) is RuntimeError and str(error) == "can't start new thread"
    return isinstance(error, MemoryError) or no_thread or (isinstance(error, OSError) and error.errno == ENOMEM)


def describe_crash(what: str, error: Exception) -> str:
    """Why a part of a diagnosis has no result: there is not enough memory, or kvdoctor has an error."""
    if lacks_memory(error):
        return f"{what} needs more memory than there is, or than --max-memory allows"
    return f"{what} crashed ({type(error).__name__}: {error}); please report it"


class CannotCheck(Exception):
    """A question about a model has no answer, for this reason; where it is `essential`, the model is not healthy.

    Raised by checks, experiments and whatever they ask; whoever runs them catches it, and the reason is reported.
    """

    def __init__(self, reason: str, *, essential: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.essential = essential


class Explained(CannotCheck):
    """Another finding explains what a check would report, so that one fault is one finding."""


HUB = re.compile(
    r"(?:https?://(?:huggingface\.co|hf\.co)/(?:([\w.-]+)/)?|([\w.-]+)/)([\w.-]+)(?:/(?:tree|blob|resolve)/.*|/)?"
)
"""A name on the hub, with its owner or in an address."""


def how_to_get(path: str) -> str:
    """The command that downloads what was given in place of a path: a name on the hub, or an address; else nothing."""
    name = HUB.fullmatch(path)
    if name and not os.path.exists(path.partition("/")[0]):  # noqa: PTH110
        wanted = "/".join(part for part in name.groups() if part)
        return f"; a model of the Hugging Face Hub: hf download {wanted} --local-dir {name[3]}"
    return f"; download it first: curl -LO {as_argument(path)}" if re.match(r"https?://", path) else ""


def free_name(wanted: str, taken: str | None = None) -> str:
    """The first of NAME, NAME2, NAME3, ... that no file or folder has, and that is not `taken` either."""
    names = (wanted, *(f"{wanted}{number}" for number in range(2, 1000)))
    return next((name for name in names if name != taken and not os.path.lexists(name)), wanted)


def similar_names(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are spelled most like a name, the best first; `cutoff` is the least likeness."""
    from difflib import get_close_matches

    return get_close_matches(name, list(known), most, cutoff)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the question for the known name that was probably meant; empty if none is similar."""
    close = similar_names(name, known, cutoff=cutoff)
    return f"did you mean {close[0]!r}?" if close else ""


def _escape(character: str) -> str:
    """A character between `$'` and `'`: its bytes in octal where it cannot be printed."""
    if character.isprintable():
        return f"\\{character}" if character in "'\\" else character
    if character == "\n":
        return r"\n"
    a_byte = "\udc80" <= character <= "\udcff"  # of a name that is no UTF-8
    encoded = character.encode("utf-8", "surrogateescape" if a_byte else "surrogatepass")
    return "".join(f"\\{byte:03o}" for byte in encoded)


def as_argument(text: str, windows: bool = os.name == "nt") -> str:
    r"""A path as one argument of a suggested command, quoted where the shell would take it for something else.

    One that begins with a dash would be taken for an option. Characters that are not printed, such as the end of a
    line, are written as escapes (`$'a\nb'`), which bash, zsh and ksh read, and POSIX since 2024. The shells of
    Windows take a backslash as it is, and cmd.exe knows no single quotes.
    """
    if text.startswith("-"):
        text = f"./{text}"
    if not windows:
        return shlex.quote(text) if text.isprintable() else f"$'{''.join(map(_escape, text))}'"
    if re.fullmatch(r"[\w@%+=:,./\\~-]+", text):
        return text
    tail = text[len(text.rstrip("\\")) :]  # before a quote, programs read two backslashes as one
    return f'"{text}{tail}"'
