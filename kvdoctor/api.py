"""The commands as functions, for `import kvdoctor` and for the command line alike (docs/python.md).

Nothing is printed, no signal handler is set, and neither folder nor environment of the process changes. Options are
keyword arguments with the names of the command line's.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvdoctor import asking
from kvdoctor.choices import AGREE
from kvdoctor.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from kvdoctor.gating import Judged
    from kvdoctor.report.diff_document import DiffReport
    from kvdoctor.report.document import Report

    Path = str | os.PathLike[str]


def inspect(path: "Path", **options: "Unpack[asking.InspectOptions]") -> "Report":
    """Read a model without running it and without its weights: files, inputs, outputs, the cache contract.

    Raises:
        UsageError: there is nothing at the path, or an option has a value that it does not take.
    """
    asking.refuse_unknown("inspect", options, asking.InspectOptions)
    from kvdoctor import doctor

    return doctor.inspect(os.fspath(path), asking.options_of(dict(options)))


def step_test(path: "Path", **options: "Unpack[asking.StepTestOptions]") -> "Report":
    """Run decode steps with and without the cache in a process of its own, and say what they showed.

    Raises:
        UsageError: there is nothing at the path, or an option has a value that it does not take.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asking.refuse_unknown("step_test", options, asking.StepTestOptions)
    from kvdoctor.runtimes import Runtime

    # Started before the rest is loaded: the worker opens the runtime in the meantime.
    with Runtime(asking.limits_of(dict(options))) as runtime:
        from kvdoctor import doctor

        return doctor.step_test(os.fspath(path), asking.options_of(dict(options)), runtime)


def re_export(path: "Path | None", out: "Path | None" = None, **options: "Unpack[asking.ReExportOptions]") -> "Report":
    """Repair a copy of the model in the folder `out`, prove it, and write a fix report beside it.

    Without `out` the repair is made and proved in a private folder, and nothing is kept. With `from_` the model is
    exported afresh from that checkpoint, and `path` is the model to be replaced, or None.

    Raises:
        UsageError: there is nothing at the path, `out` must not be written, or an option has a value that it does not
            take; nothing was written.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asking.refuse_unknown("re_export", options, asking.ReExportOptions)
    asked: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    shared = asking.options_of(asked)
    plan: dict[str, Any] = {
        "path": None if path is None else os.fspath(path),
        "out": None if out is None else os.fspath(out),
        "force": bool(asked.get("force", False)),
        "fix": asking.repairs(asked.get("fix", ())),
        "keep_unproved": bool(asked.get("keep_unproved", False)),
        "fit": asking.fit_of(asked),
    }
    if "from_" not in asked:
        asking.refuse_without_checkpoint(asked, path)
        from kvdoctor import re_exporting

        return re_exporting.re_export(re_exporting.Request(**plan), shared)
    from kvdoctor import exporting_afresh
    from kvdoctor.afresh.asked import Asked

    how = asking.making_of(asked)
    said = getattr(shared.progress, "say", None)
    return exporting_afresh.export_afresh(Asked(os.fspath(asked["from_"]), **plan, **how), shared, said)


def gate(paths: "Path | Iterable[Path]", **options: "Unpack[asking.GateOptions]") -> "Judged":
    """Inspect and step-test models, and judge them together.

    Raises:
        UsageError: there is nothing at one of the paths, or an option has a value that it does not take.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asking.refuse_unknown("gate", options, asking.GateOptions)
    from kvdoctor import gating
    from kvdoctor.baseline import read_baseline

    shared = asking.options_of(dict(options))
    models = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not models:
        raise UsageError("gate was given no model; give the path of one at least")
    file = options.get("baseline")
    known = None if file is None else read_baseline(os.fspath(file))
    jobs = [gating.Job(os.fspath(path), shared) for path in models]
    return gating.gate(jobs, asking.how_of(dict(options)), static=bool(options.get("static")), baseline=known)


def diff(a: "Path", b: "Path", **options: "Unpack[asking.DiffOptions]") -> "DiffReport":
    """Hold a model against another: contract, graph and behaviour. Either may be a JSON report of kvdoctor.

    Raises:
        UsageError: there is nothing at a path, a report cannot be read, or an option has a value it does not take.
        KvdoctorError: ONNX Runtime cannot be started.
    """
    asking.refuse_unknown("diff", options, asking.DiffOptions)
    from kvdoctor.comparing import Request, compare

    agree, static = options.get("agree"), bool(options.get("static", False))
    if agree is not None:
        asking.one_of("agree", agree, AGREE)
    return compare(Request(os.fspath(a), os.fspath(b), static, agree), asking.options_of(dict(options)))


def read_report(path: "Path") -> "Report":
    """Read a report that was written with `--format json`; of a gate's document, the only one in it.

    Raises:
        UsageError: it cannot be read, is none, or is one of another version of the schema.
    """
    from kvdoctor.report.stored import read_report as read

    return read(os.fspath(path))
