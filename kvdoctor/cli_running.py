"""The options of `gate` that say how the models are run, and change nothing in what is said of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from kvdoctor.gating import How
    from kvdoctor.progress import Told


def gate_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How many models run at once and where, and whether what has not changed is run again."""
    options = [
        click.option(
            "--jobs",
            type=click.IntRange(min=1),
            metavar="N",
            help="Models to run side by side. [default: as cores and memory allow]",
        ),
        click.option("--no-cache", is_flag=True, help="Run also what has not changed since it was last run."),
        click.option(
            "--cache-dir",
            metavar="DIR",
            envvar="KVDOCTOR_CACHE_DIR",
            help="Where reports of unchanged models are kept. [default: the user's cache folder]",
        ),
        click.option(
            "--cluster",
            metavar="ADDRESS",
            help="Run the models on the Dask cluster with this scheduler, as in tcp://HOST:8786.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def how_given(given: dict[str, Any], told: "Told | None") -> "How":
    """How the jobs of a gate are to be run."""
    from pathlib import Path

    from kvdoctor.export.made_by_pip import cache_folder
    from kvdoctor.gating import How

    if given.get("static"):
        _refuse_with_static()
    if given["jobs"] is not None and given["cluster"] is not None:
        raise click.UsageError("--jobs is for this machine; a cluster runs as many models as its workers have threads")
    kept = Path(given["cache_dir"]) if given["cache_dir"] else cache_folder() / "gate"
    if kept.exists() and not kept.is_dir():
        raise click.UsageError(f"--cache-dir {str(kept)!r} is no folder; give another one, or --no-cache")
    cache = None if given["no_cache"] else kept
    return How(given["jobs"], cache, given["cluster"], None if told is None else told.say)


def _refuse_with_static() -> None:
    """Refuse what was said for models that run; a variable of the environment or a policy says it for every gate."""
    context = click.get_current_context()
    for name in ("jobs", "cache_dir", "cluster"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise click.UsageError(f"{option} is for models that are run, and --static runs none; leave one out")
