"""kvdoctor: diagnoses and repairs ONNX decoders with a KV cache.

The commands as functions: `inspect`, `step_test`, `re_export`, `convert`, `repro`, `record_golden`, `speed`, `loop`,
`gate` and `diff`; and `read_contracts`, `read_report`, `read_policy` and `render` (docs/python.md);
`recording` notes the calls of your own loop. Importing this loads none of them: what they need (onnx, numpy, rich) is
loaded with the first call.
"""

from kvdoctor._version import __version__

TYPE_CHECKING = False  # type checkers take it for that of typing, which is slow to load

if TYPE_CHECKING:
    from kvdoctor.addons.comparison.api import DiffOptions, RecordOptions, diff, record_golden
    from kvdoctor.addons.comparison.document import DiffReport
    from kvdoctor.addons.conversions.api import ConvertOptions, convert
    from kvdoctor.addons.loops.api import LoopOptions, loop
    from kvdoctor.addons.loops.pipeline import WrittenLoop
    from kvdoctor.addons.reproducer.api import ReproOptions, repro
    from kvdoctor.addons.traces.recorded import recording
    from kvdoctor.api import (
        GateOptions,
        InspectOptions,
        ReExportOptions,
        SpeedOptions,
        StepTestOptions,
        gate,
        inspect,
        re_export,
        read_contracts,
        read_policy,
        read_report,
        render,
        speed,
        step_test,
    )
    from kvdoctor.errors import KvdoctorError, Unhealthy, UsageError, Worse
    from kvdoctor.findings import Finding
    from kvdoctor.gating.policy import Policy
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.report.document import Report

__all__ = ["__version__", "convert", "diff", "gate", "inspect", "loop", "re_export", "read_contracts", "read_policy"]
__all__ += ["read_report", "record_golden", "recording", "render", "repro", "speed", "step_test"]
__all__ += ["ConvertOptions", "DiffOptions", "GateOptions", "InspectOptions", "LoopOptions"]
__all__ += ["ReExportOptions", "RecordOptions", "ReproOptions", "SpeedOptions", "StepTestOptions"]
__all__ += ["DiffReport", "Finding", "GateResult", "KvdoctorError", "Policy", "Report"]
__all__ += ["Unhealthy", "UsageError", "Worse", "WrittenLoop"]

if not TYPE_CHECKING:  # a type checker must see that other names are not there
    HOMES = {
        "addons.traces.recorded": ("recording",),
        "errors": ("KvdoctorError", "Unhealthy", "UsageError", "Worse"),
        "findings": ("Finding",),
        "gating.verdict": ("GateResult",),
        "gating.policy": ("Policy",),
        "addons.loops.pipeline": ("WrittenLoop",),
        "addons.comparison.document": ("DiffReport",),
        "report.document": ("Report",),
    }

    def __getattr__(name):
        """Load a name at its first use (PEP 562); that of an add-on is there if the add-on is."""
        import importlib

        if name not in __all__:
            raise AttributeError(f"module 'kvdoctor' has no attribute {name!r}")
        from kvdoctor import addons

        home = next((home for home, names in HOMES.items() if name in names), "api")
        if home.startswith("addons.") and home.split(".")[1] not in addons.names():
            raise AttributeError(f"the add-on with {name!r} is not there")
        first = importlib.import_module(f"kvdoctor.{home}")
        homes = (one for found in ((first,), addons.modules("api")) for one in found)  # add-ons are loaded last
        return getattr(next((one for one in homes if hasattr(one, name)), first), name)

    def __dir__():
        """List the names that can be imported, loaded or not."""
        return sorted({*globals(), *__all__})
