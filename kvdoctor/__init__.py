"""kvdoctor: the doctor for ONNX decoders with a KV cache.

The commands as functions: `inspect`, `step_test`, `re_export`, `gate`, `diff` and `read_report` (docs/python.md).
Importing this loads none of them: what they need (onnx, numpy, rich) comes with the first call.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False  # type checkers take it for that of typing, which is slow to load

if TYPE_CHECKING:
    from kvdoctor.api import diff, gate, inspect, re_export, read_report, step_test
    from kvdoctor.asking import DiffOptions, GateOptions, InspectOptions, ReExportOptions, StepTestOptions
    from kvdoctor.errors import KvdoctorError, Unhealthy, UsageError, Worse
    from kvdoctor.findings import Finding
    from kvdoctor.gating import Judged
    from kvdoctor.report.diff_document import DiffReport
    from kvdoctor.report.document import Report

__all__ = (
    "DiffOptions",
    "DiffReport",
    "Finding",
    "GateOptions",
    "InspectOptions",
    "Judged",
    "KvdoctorError",
    "ReExportOptions",
    "Report",
    "StepTestOptions",
    "Unhealthy",
    "UsageError",
    "Worse",
    "__version__",
    "diff",
    "gate",
    "inspect",
    "re_export",
    "read_report",
    "step_test",
)

if not TYPE_CHECKING:  # a type checker must see that other names are not there
    HOMES = {
        "api": ("diff", "gate", "inspect", "re_export", "read_report", "step_test"),
        "asking": ("DiffOptions", "GateOptions", "InspectOptions", "ReExportOptions", "StepTestOptions"),
        "errors": ("KvdoctorError", "Unhealthy", "UsageError", "Worse"),
        "findings": ("Finding",),
        "gating": ("Judged",),
        "report.diff_document": ("DiffReport",),
        "report.document": ("Report",),
    }

    def __getattr__(name):
        """Load what is asked for when it is asked for first (PEP 562)."""
        import importlib

        home = next((home for home, names in HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module 'kvdoctor' has no attribute {name!r}")
        return getattr(importlib.import_module(f"kvdoctor.{home}"), name)

    def __dir__():
        """Name what can be asked for, loaded or not."""
        return sorted({*globals(), *__all__})
