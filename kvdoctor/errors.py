"""The errors of kvdoctor. Each message says what is wrong, where, and what to do next."""


class KvdoctorError(Exception):
    """Root of all errors that kvdoctor raises on purpose; the command line turns it into exit code 2."""


class UsageError(KvdoctorError):
    """The call cannot be carried out as asked: a path that is not there, an OUT that exists, a bad option."""


class UnreadableError(KvdoctorError):
    """A file is not a readable ONNX model. `reason` names the kind of damage in a few words.

    The doctor turns it into the finding `unreadable`: a damaged file is a result, not a crash.
    """

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"{reason}; {advice}")
        self.reason = reason
        self.advice = advice


class WorkerDied(KvdoctorError):
    """The process that runs the model ended before it answered. `how` says by which signal or limit."""

    def __init__(self, how: str, limit: str | None = None) -> None:
        super().__init__(how)
        self.how = how
        self.limit = limit


class Unhealthy(KvdoctorError):
    """A model was not shown to be healthy: `raise_for_findings` of its report raises it, with the findings in words."""


class Worse(KvdoctorError):
    """One model is worse than another, or they could not be compared: `raise_if_worse` of a diff raises it."""
