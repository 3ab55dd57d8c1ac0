"""What devices are documented to refuse of a stack, in words."""

from collections.abc import Iterator, Sequence

from kvdoctor.report.facts import DeviceLimit, StackFacts

DEVICES_TITLE = "limits of devices, documented and not measured"
ABOUT = {
    "empty-past": "empty past",
    "dynamic-axes": "dynamic axes",
    "if": "If",
    "branch-shapes": "branches of other shapes",
    "int64": "int64",
    "float64": "double",
    "attention-past": "Attention with past",
    "growing-gqa": "growing GroupQueryAttention",
    "operators": "operators",
}
EFFECTS = {"fails": "fails", "left-out": "not on the device"}
MOST_NAMES = 4


def outline_devices(stacks: Sequence[StackFacts]) -> Iterator[tuple[str, str]]:
    """All stacks in one line: what the graphs have, with the devices that are documented to refuse it."""
    found: dict[str, list[str]] = {}
    for limit in (limit for stack in stacks for limit in stack.devices):
        found.setdefault(ABOUT[limit.about], []).append(limit.device)
    parts = [f"{about} ({', '.join(sorted(set(devices)))})" for about, devices in found.items()]
    if parts:
        yield "devices", f"documented, not measured: {'; '.join(parts)}"


def describe_devices(stack: StackFacts) -> Iterator[tuple[str, str]]:
    """Each limit with what it concerns and its sources, as label and text; a device that repeats is left out."""
    device = ""
    for limit in stack.devices:
        yield "" if limit.device == device else limit.device, _describe(limit)
        device = limit.device


def _describe(limit: DeviceLimit) -> str:
    names = ", ".join(limit.subject[:MOST_NAMES])
    if len(limit.subject) > MOST_NAMES:
        names += f" and {len(limit.subject) - MOST_NAMES} more"
    return f"{EFFECTS[limit.effect]}: {limit.words} ({names}); as of {limit.as_of}: {' '.join(limit.sources)}"
