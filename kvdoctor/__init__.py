"""kvdoctor: diagnoses and repairs ONNX decoders with a KV cache.

The commands as functions: `inspect`, `step_test`, `re_export`, `repro`, `record_golden`, `speed`, `loop`, `probe`,
`judge`, `gate` and `diff`; and `read_contracts`, `read_report`, `read_policy` and `render` (docs/python.md);
`recording` notes the calls of your own loop. Importing this loads none of them: what they need (onnx, numpy, rich) is
loaded with the first call.
"""

from kvdoctor._version import __version__

TYPE_CHECKING = False  # type checkers take it for that of typing, which is slow to load

if TYPE_CHECKING:
    from kvdoctor.api import (
        DiffOptions,
        GateOptions,
        InspectOptions,
        JudgeOptions,
        LoopOptions,
        ProbeOptions,
        RecordOptions,
        ReExportOptions,
        ReproOptions,
        SpeedOptions,
        StepTestOptions,
        diff,
        gate,
        inspect,
        judge,
        loop,
        probe,
        re_export,
        read_contracts,
        read_policy,
        read_report,
        record_golden,
        render,
        repro,
        speed,
        step_test,
    )
    from kvdoctor.decode.caller_trace.recording import recording
    from kvdoctor.errors import KvdoctorError, Unhealthy, UsageError, Worse
    from kvdoctor.findings import Finding
    from kvdoctor.gating.policy import Policy
    from kvdoctor.gating.verdict import GateResult
    from kvdoctor.loops.pipeline import WrittenLoop
    from kvdoctor.report.diff_document import DiffReport
    from kvdoctor.report.document import Report

__all__ = (
    "DiffOptions",
    "DiffReport",
    "Finding",
    "GateOptions",
    "GateResult",
    "InspectOptions",
    "JudgeOptions",
    "KvdoctorError",
    "LoopOptions",
    "Policy",
    "ProbeOptions",
    "ReExportOptions",
    "RecordOptions",
    "Report",
    "ReproOptions",
    "SpeedOptions",
    "StepTestOptions",
    "Unhealthy",
    "UsageError",
    "Worse",
    "WrittenLoop",
    "__version__",
    "diff",
    "gate",
    "inspect",
    "judge",
    "loop",
    "probe",
    "re_export",
    "read_contracts",
    "read_policy",
    "read_report",
    "record_golden",
    "recording",
    "render",
    "repro",
    "speed",
    "step_test",
)

if not TYPE_CHECKING:  # a type checker must see that other names are not there
    HOMES = {
        "decode.caller_trace.recording": ("recording",),
        "errors": ("KvdoctorError", "Unhealthy", "UsageError", "Worse"),
        "findings": ("Finding",),
        "gating.verdict": ("GateResult",),
        "gating.policy": ("Policy",),
        "loops.pipeline": ("WrittenLoop",),
        "report.diff_document": ("DiffReport",),
        "report.document": ("Report",),
    }

    def __getattr__(name):
        """Load a name at its first use (PEP 562)."""
        import importlib

        if name not in __all__:
            raise AttributeError(f"module 'kvdoctor' has no attribute {name!r}")
        home = next((home for home, names in HOMES.items() if name in names), "api")
        return getattr(importlib.import_module(f"kvdoctor.{home}"), name)

    def __dir__():
        """List the names that can be imported, loaded or not."""
        return sorted({*globals(), *__all__})
