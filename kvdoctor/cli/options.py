"""The options of each command, translated from the table of `kvdoctor.options` into click's."""

import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from kvdoctor.choices import File, Flag, Names, WrongValue
from kvdoctor.options import CHECKS, HELP_GROUPS, OTHER, Option, options_of

if TYPE_CHECKING:
    from kvdoctor.gating.policy import Policy

Command = TypeVar("Command", bound=Callable[..., Any])

LEAST_LIMIT = 2 << 30
"""Bytes that this process may have in any case: `--max-memory` is that of the model."""
GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
SELDOM_COMPUTE = ("step-test", "explain", "env")  # elsewhere numpy is loaded early, while there is memory for it
LOADING = threading.RLock()


class _LoadedAtUse(ModuleType):
    """A package that is loaded when something of it is first used, and not by an import."""

    def __getattr__(self, name: str) -> Any:
        with LOADING:  # what the package itself asks for while it is loaded comes here as well
            if type(self) is _LoadedAtUse and not hasattr(self.__spec__, "is_loading"):
                self._load()
        return ModuleType.__getattribute__(self, name)

    def _load(self) -> None:
        spec: Any = self.__spec__
        spec.is_loading, self.__path__ = True, spec.submodule_search_locations
        try:
            spec.loader.exec_module(self)
        except BaseException:
            sys.modules.pop(self.__name__, None)
            raise
        self.__class__ = ModuleType  # type: ignore[assignment]


def _load_at_use(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and name not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        del module.__path__  # otherwise a module of the package could be loaded before the package
        module.__class__ = _LoadedAtUse
        sys.modules[name] = module


class GroupedOption(click.Option):
    """An option that stands under a heading of the help page."""

    def __init__(self, *words: Any, group: str = OTHER, **more: Any) -> None:
        super().__init__(*words, **more)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help page has its options in groups.

    Considered: cloup and rich-click. Each is a dependency for this one method, and rich-click loads rich.
    """

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by groups, each in the order of the command."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in HELP_GROUPS}
        for one in self.get_params(context):
            if isinstance(one, click.Option) and (record := one.get_help_record(context)) is not None:
                groups[one.group if isinstance(one, GroupedOption) else OTHER].append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records, col_max=24)

    def invoke(self, context: click.Context) -> Any:
        """Run the command."""
        if self.name in SELDOM_COMPUTE:
            _load_at_use("numpy")
        return super().invoke(context)


def command(short: str, *, name: str | None = None, epilog: str) -> Callable[[Callable[..., Any]], GroupedCommand]:
    """Make a command; `short` is its line in the list of commands, which 80 columns hold."""
    return click.command(name, cls=GroupedCommand, short_help=short, epilog=epilog)


def table_options(name: str) -> Callable[[Command], Command]:
    """Add the options that the table has for the command of that name."""

    def add(command: Command) -> Command:
        for option in reversed(options_of(name)):
            if option.flag is not None:
                command = _click_option(option)(command)
        return command

    return add


def policy_options(command: Command) -> Command:
    """Add the options that choose the policy."""
    group: dict[str, Any] = {"cls": GroupedOption, "group": CHECKS}
    command = click.option("--no-config", is_flag=True, help="Follow no policy.", **group)(command)
    return click.option(
        "--config",
        metavar="FILE",
        help="Follow the policy in this file; else that of kvdoctor.toml or pyproject.toml in this folder or above.",
        **group,
    )(command)


def given_options() -> dict[str, Any]:
    """Return the options of the table that the command line or the environment gives, as keyword arguments."""
    context = click.get_current_context()
    _limit_memory(context.params.get("max_memory"))
    return {
        option.keyword: context.params[option.keyword]
        for option in options_of(str(context.command.name))
        if context.get_parameter_source(option.keyword) in GIVEN
    }


def _limit_memory(most: int | None) -> None:
    """Let this process fail to allocate before the machine has no memory left, or beyond the limit of the worker.

    What is mapped from files does not count: the system can drop it.
    """
    if sys.platform == "linux":
        import resource

        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10 * 9
        limit, hard = (
            whole if most is None else max(most << 20, LEAST_LIMIT),
            resource.getrlimit(resource.RLIMIT_DATA)[1],
        )
        if hard == resource.RLIM_INFINITY or limit < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def given_paths() -> tuple[str, ...]:
    """Return the paths on the command line that the current command reads."""
    context = click.get_current_context()
    arguments = (each.name for each in context.command.params if isinstance(each, click.Argument))
    files = (option.keyword for option in options_of(str(context.command.name)) if type(option.kind) is File)
    values = (context.params.get(name) for name in (*arguments, *files) if name is not None)
    return tuple(path for value in values for path in (value if isinstance(value, tuple) else (value,)) if path)


def chosen_policy(given: dict[str, Any]) -> "Policy":
    """Return the policy that a command follows: that of `--config`, or of the project.

    Raises:
        UsageError: it cannot be read, or the file that was named holds none.
    """
    import kvdoctor

    if given["config"] and given["no_config"]:
        raise click.UsageError("give --config FILE or --no-config, not both")
    return kvdoctor.Policy() if given["no_config"] else kvdoctor.read_policy(given["config"] or None)


def examples(*calls: tuple[str, str]) -> str:
    """Return the end of a help page: calls and their purposes, on one line each where they fit into 80 columns."""
    width = max(len(call) for call, _ in calls)
    in_columns = all(width + 4 + len(purpose) <= 78 for _, purpose in calls)
    lines = (f"  {call:<{width}}  {purpose}" if in_columns else f"  {call}\n      {purpose}" for call, purpose in calls)
    return "Examples:\n\n\b\n" + "\n".join(lines)


def _click_option(option: Option) -> Callable[[Command], Command]:
    flag = f"--{option.flag or option.key}"
    if isinstance(option.kind, Flag):
        value = not (option.flag or "").startswith("no-")
        return click.option(
            flag,
            option.keyword,
            is_flag=True,
            flag_value=value,
            default=option.default,
            help=option.flag_help or option.help,
            cls=GroupedOption,
            group=option.group,
        )
    several = isinstance(option.kind, Names)
    return click.option(
        flag,
        option.keyword,
        multiple=several,
        callback=None if several else _reader(option),
        metavar=option.kind.metavar,
        envvar=option.environment or None,
        help=_help(option),
        shell_complete=_completer(option),
        cls=GroupedOption,
        group=option.group,
    )


def _completer(option: Option) -> Callable[[click.Context, click.Parameter, str], Any]:
    """Complete a path, or the last item of a comma-separated list."""

    def complete(context: click.Context, parameter: click.Parameter, start: str) -> Any:
        if isinstance(option.kind, File):
            return click.Path().shell_complete(context, parameter, start)
        before, comma, last = start.rpartition(",")
        return [f"{before}{comma}{word}" for word in option.kind.words() if word.startswith(last)]

    return complete


def _reader(option: Option) -> Callable[[click.Context, click.Parameter, str | None], Any]:
    """Parse an argument by the option's own kind, so that every caller gets the same message."""

    def read(_context: click.Context, _option: click.Parameter, word: str | None) -> Any:
        try:
            return None if word is None else option.kind.parse(word)
        except WrongValue as reason:
            raise click.BadParameter(str(reason)) from None

    return read


def _help(option: Option) -> str:
    """Return the help of an option, with the bounds of its value and its default."""
    value = () if option.default in (None, {}) else option.default
    default = option.unset or (", ".join(value) if isinstance(value, tuple) else f"{value}")
    notes = (
        option.kind.limits,
        f"default: {default}" if default else "",
        "may be repeated" if isinstance(option.kind, Names) else "",
    )
    shown = "; ".join(note for note in notes if note)
    return f"{option.help}  [{shown}]" if shown else option.help
