"""What a release takes that is newer than the table: asked of the release itself."""

from contextlib import suppress
from dataclasses import replace

from kvdoctor.elsewhere.environments import environment
from kvdoctor.errors import KvdoctorError
from kvdoctor.runtimes import Runtime
from kvdoctor.targets import Target
from kvdoctor.targets.limits import Limits


def measured(target: Target, runtime: Runtime) -> Target:
    """A target with its limits; `runtime` has its release. Operators that it lacks are not asked for.

    A worker that dies of the question leaves the target as it was.
    """
    if target.limits is not None:
        return target
    with suppress(KvdoctorError):
        for event in runtime.ask({"ceilings": True}):
            if event["event"] == "ceilings" and "ir" in event:
                limits = Limits(target.onnxruntime, event["ir"], event["opset"], (), frozenset())
                target = replace(target, measured=limits)
    return target


def measured_beside(target: Target, here: Runtime, offline: bool) -> Target:
    """A target with its limits, where its release can be had; `here` is the runtime of this Python."""
    if target.limits is not None:
        return target
    if here.versions.get("onnxruntime") == target.onnxruntime:
        return measured(target, here)
    with suppress(KvdoctorError):
        there = here.beside(str(environment(target.onnxruntime, offline=offline)))
        there.greet()
        return measured(target, there)
    return target
