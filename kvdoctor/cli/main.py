"""The command line: its commands, its exit codes and its errors. Nothing is diagnosed here.

Only click is imported at the top: `--help` and `--version` load neither onnx nor numpy nor rich.
"""

import importlib
import os
import signal
import sys
from contextlib import suppress
from functools import cache
from mmap import mmap
from pathlib import Path
from typing import Any, NoReturn

import click

from kvdoctor import addons
from kvdoctor._version import __version__
from kvdoctor.cli.options import examples
from kvdoctor.cli.output import closed_pipe_allowed, complain, discard_output, end, is_closed_pipe, names_folder
from kvdoctor.errors import KvdoctorError, RuntimeUnavailable, did_you_mean, how_to_get, lacks_memory

EXIT_USAGE, EXIT_INCOMPLETE, EXIT_INTERRUPTED = 2, 3, 130
LEAST_MEMORY = 96 << 20
"""Bytes that the smallest diagnosis takes."""

COMMANDS = {
    **dict.fromkeys(("step-test", "inspect", "re-export", "contract", "speed"), "diagnose"),
    **dict.fromkeys(("gate", "baseline", "config"), "gate"),
    **dict.fromkeys(("explain", "env", "schema"), "info"),
}
"""The commands of the core, each with its module in this package."""
GROUPS = {
    "Diagnose": ("step-test", "inspect", "explain", "diff", "speed"),
    "Repair and convert": ("re-export", "convert", "repro"),
    "Write a decode loop": ("contract", "loop"),
    "Guard models in CI": ("gate", "baseline", "config", "record"),
    "About kvdoctor": ("env", "schema"),
}
"""The commands as the help lists them; those of add-ons that are not there are left out."""


@cache
def added_commands() -> dict[str, click.Command]:
    """The commands of the add-ons that are there."""
    found = (value for module in addons.modules("commands") for value in vars(module).values())
    return {str(one.name): one for one in found if isinstance(one, click.Command)}


def list_commands() -> list[str]:
    """The names of all commands, those of the core first."""
    return [*COMMANDS, *added_commands()]


def find_command(name: str) -> click.Command | None:
    """Load a command; None where there is none of that name."""
    if name not in COMMANDS:
        return added_commands().get(name)
    module = importlib.import_module(f"kvdoctor.cli.{COMMANDS[name]}")
    command: click.Command = getattr(module, name.replace("-", "_"))
    return command


SYNONYMS = {
    "step-test": ("check", "validate", "verify", "test", "diagnose", "run"),
    "re-export": ("fix", "repair", "export"),
    "speed": ("bench", "benchmark", "perf"),
    "diff": ("compare",),
    "inspect": ("show", "info", "lint"),
    "repro": ("minimize", "reduce"),
    "loop": ("generate", "decode"),
}
"""What people call a command."""


def meant_command(name: str) -> str | None:
    """The command of that name or synonym, if it is there."""
    there = list_commands()
    meant = next((command for command, names in SYNONYMS.items() if name in names), name)
    return meant if meant in there else None


EXAMPLES = (
    ("kvdoctor exports/marian", "what decode steps show"),
    ("kvdoctor inspect exports/marian", "what the files declare"),
    ("kvdoctor re-export exports/marian -o fixed", "a repaired and proved copy"),
    ("kvdoctor repro exports/marian -o to-send", "the failure without the weights"),
    ("kvdoctor loop exports/marian --language rust -o decode", "a program that decodes"),
    ("kvdoctor gate exports/*", "for CI: exit code 0, 1, 2 or 3"),
)
"""Calls at the end of the help, each with its purpose."""


class _Commands(click.Group):
    """Loads the module of a command only when it is called, or when the help lists them all.

    Where the reader of standard output has gone, click would end with 1, which means findings here. A command that has
    a verdict ends by it; the others, and the help, did what they were asked for.
    """

    def make_context(self, *words: Any, **more: Any) -> click.Context:
        try:
            return super().make_context(*words, **more)
        except OSError as error:
            if not is_closed_pipe(error):
                raise
            discard_output()
            end(0)

    def invoke(self, context: click.Context) -> Any:
        with closed_pipe_allowed():
            return super().invoke(context)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Let options of a command come before its name, or before the PATH of a step-test."""
        own = [name for option in self.get_params(context) for name in option.opts]
        if args[:1] and args[0].startswith("-") and args[0] not in own:
            name = next((word for word in args if word in list_commands()), None)
            args = [name or "step-test", *(args if name is None else [word for word in args if word != name])]
        return super().parse_args(context, args)

    def list_commands(self, _: click.Context) -> list[str]:
        return list_commands()

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            found = [(name, command.get_short_help_str(80)) for name in names if (command := find_command(name))]
            with formatter.section(title):
                formatter.write_dl(found)

    def get_command(self, _: click.Context, name: str) -> click.Command | None:
        return find_command(name)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, without those of add-ons that are not there."""
        there = {"exports/marian", *list_commands()}
        self.epilog = examples(*(one for one in EXAMPLES if one[0].split()[1] in there))
        super().format_epilog(context, formatter)

    def resolve_command(
        self, context: click.Context, words: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the first argument names; a path that exists is step-tested.

        Raises:
            UsageError: the argument is neither a command nor a path.
        """
        word = words[0]
        if word in COMMANDS or word in added_commands():
            return super().resolve_command(context, words)
        with suppress(OSError):  # an argument that is too long for a path
            if Path(word).exists():
                return "step-test", find_command("step-test"), words
        if names_folder(word) or word.endswith(".onnx"):
            asked = f"{word!r} does not exist; give an .onnx file or the folder of an export{how_to_get(word)}"
            raise click.UsageError(asked, context)
        known = meant_command(word)
        meant = f"did you mean {known!r}?" if known else did_you_mean(word, list_commands())
        raise click.UsageError(f"there is no command and no path {word!r}{'; ' if meant else ''}{meant}", context)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, "-V", "--version", package_name="kvdoctor", message="kvdoctor %(version)s")
def cli() -> None:
    """Diagnose and repair ONNX decoders with a KV cache. A PATH without COMMAND is step-tested.

    `kvdoctor COMMAND -h` has the options. Exit code 0: healthy. 1: findings. 2: wrong usage. 3: not checked.
    """


def main() -> NoReturn:
    """Run the command line. Errors that kvdoctor raises on purpose end with exit code 2 and one line."""
    # Products are small here, and numpy's library takes memory for each thread; where there is none, it ends by code 1.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        mmap(-1, LEAST_MEMORY).close()
        _prepare_streams()
        _show_notices()
        _end_in_order()
        cli.main(standalone_mode=False)
        end(0)
    except click.ClickException as error:
        _show(error)
        raise SystemExit(EXIT_USAGE) from None
    except (click.Abort, KeyboardInterrupt):
        complain("interrupted")
        # Where the interrupt met an `exec`, as dataclasses use it, Python would end by the signal although it was
        # caught here (CPython, exit_sigint). All else that had to be cleaned up has been on the way to this line.
        if (scratch := sys.modules.get("kvdoctor.runtime.scratch")) is not None:
            scratch.remove_all()
        os._exit(EXIT_INTERRUPTED)
    except KvdoctorError as error:
        from kvdoctor.report.escaping import printable, shortened

        complain(printable(shortened(str(error), 1200)))
        raise SystemExit(EXIT_INCOMPLETE if isinstance(error, RuntimeUnavailable) else EXIT_USAGE) from None
    except (ImportError, MemoryError, OSError, RuntimeError) as error:
        if lacks_memory(error) or (isinstance(error, ImportError) and _is_memory_used_up()):
            complain("there is not enough memory for this; nothing can be said of the model")
            raise SystemExit(EXIT_INCOMPLETE) from None
        if isinstance(error, ImportError):
            complain(f"a package that kvdoctor needs cannot be imported ({error}); install kvdoctor again with pip")
            raise SystemExit(EXIT_INCOMPLETE) from None
        if not isinstance(error, OSError):
            raise
        complain(f"the report could not be written: {error.strerror or error}")
        discard_output()
        raise SystemExit(EXIT_USAGE) from None


def _is_memory_used_up() -> bool:
    """Whether what a library needs cannot be mapped: the loader of libraries does not say why it fails."""
    try:
        mmap(-1, LEAST_MEMORY).close()
    except OSError:
        return True
    return False


def _show(error: click.ClickException) -> None:
    """Print an error of the command line; it may contain file names that others chose."""
    from kvdoctor.report.escaping import printable, shortened

    if isinstance(error, click.UsageError) and error.ctx is not None and error.message == error.ctx.get_help():
        click.echo(error.message, err=True)  # a command that was given nothing shows its help
        return
    said = error.format_message()
    if isinstance(error, click.NoSuchOption) and (others := _find_commands_with(error.option_name)):
        have = "has" if len(others) == 1 else "have"
        said = (
            f"No such option {error.option_name!r}; {' and '.join(f'`kvdoctor {name}`' for name in others)} {have} it."
        )
    if isinstance(error, click.NoSuchOption) and error.option_name == "-o":
        said = "There is no -o here: --output FILE writes a report, `kvdoctor re-export PATH -o OUT` a repaired copy."
    if isinstance(error, click.MissingParameter):
        said = " ".join(said.split())  # the choices of an argument stand on lines of their own
    if isinstance(error, click.NoSuchOption) and (path := _find_dashed_path(error.option_name)) is not None:
        said += f" The path is written ./{path}"
    message = printable(shortened(said, 1200))
    asked = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else None
    complain(message if asked is None else f"{message}\n  `{asked} --help` lists what it takes")


def _find_commands_with(option: str) -> list[str]:
    """The commands that take an option, where they are few."""
    commands = ((name, find_command(name)) for name in list_commands())
    found = [name for name, one in commands if one is not None and any(option in each.opts for each in one.params)]
    return found if len(found) < 3 else []


def _find_dashed_path(option: str) -> str | None:
    """An argument that was parsed as an option, and is the name of a file or folder."""
    return next((word for word in sys.argv[1:] if word.startswith(option) and os.path.lexists(word)), None)


def _end_in_order() -> None:
    """Let a request to end (`timeout`, a canceled job, a closed terminal) end the child processes as well."""

    def end(number: int, _frame: Any) -> NoReturn:
        complain(f"ended by {signal.Signals(number).name}")
        raise SystemExit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if (number := getattr(signal, name, None)) is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, end)


def _prepare_streams() -> None:
    """Make sure that standard output and error exist and accept every character."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123 - for the whole process
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure:
            reconfigure(errors="backslashreplace")


def _show_notices() -> None:
    """Print on a terminal the slow work outside of experiments, as the creation of an environment."""
    if sys.stderr.isatty():
        import logging

        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("kvdoctor: %(message)s"))
        logging.getLogger("kvdoctor").addHandler(handler)
        logging.getLogger("kvdoctor").setLevel(logging.INFO)
