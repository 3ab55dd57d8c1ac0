"""A report whose every name and text is hostile, and the texts to put there."""

from dataclasses import replace

from hypothesis import strategies as st

from kvdoctor.contract import Axis, CacheContract, Graph, Phase, Port, Slot
from kvdoctor.decode.runs import Node, Run
from kvdoctor.findings import Advice, Finding, NotChecked
from kvdoctor.report.document import Report
from kvdoctor.report.facts import FileFacts, ModelFacts, StackFacts
from kvdoctor.report.repair_record import AppliedRepair, Change, NotRepaired, Proof, RepairRecord, RepairSide

TEXTS = (
    *("\x1b[31mred\x1b[0m", "\x1b]8;;http://x\x07link\x1b]8;;\x07", "\x9b31m", "\x85next", "a\nb\r\nc\rd", "tab\there"),
    *("<script>alert(1)</script>", "<img src=x onerror=y>", "&amp;", "]]>", "<![CDATA[", "<!-- x", "--> y", "<?xml ?>"),
    *(
        "::error::x",
        "\n::error::x",
        "  ::add-mask::x",
        "a ::stop-commands::t",
        "##[error]x",
        "##vso[task.x]",
        "%0A::warning::",
    ),
    *(
        "| a | b |",
        "`",
        "``` x",
        "**bold**",
        "[x](http://y)",
        "![x](y)",
        "http://evil.example",
        "//evil.example",
        "www.evil.example",
    ),
    *("@someone", "a@b.example", "#123", "GH-12", "# title", "- item", "1. item", "> quote", "$x$", "${{ secrets.A }}"),
    *(
        "\u202eleft",
        "\u2066in\u2069",
        "\u200fmark",
        "\u2028line",
        "\u200bzero",
        "\ud800",
        "\udcff.onnx",
        "\0nul",
        "\ufffe",
    ),
    *(
        "",
        " ",
        "\\",
        "\\|",
        "a\\",
        "\u4f60\u597d" * 50,
        "{{ x }}",
        "{% x %}",
        "[bold red]x[/]",
        ":smile:",
        "a,b:c",
        "../..",
        "C:/x",
    ),
)
"""What someone might call a node, a file or a tensor."""

any_text = st.one_of(
    st.sampled_from(TEXTS),
    st.lists(st.sampled_from(TEXTS), min_size=2, max_size=4).map("".join),
    st.text(st.characters(), max_size=40),
)


def hostile_report(text: str) -> Report:
    """A report with the text in the place of every name."""
    found = Finding(
        "KV203",
        "cross-cache-emptied",
        "error",
        "suspected",
        text,
        text,
        (text, f"x{text}"),
        text,
        text,
        text,
        text,
        (text,),
        Advice("graph", text, text),
        fingerprint="0123456789abcdef",
        evidence=(text,),
    )
    notes = (replace(found, severity="warning", stack=None, code="KV005", name="graph-unsorted"),)
    node = Node(text, text)
    runs = (
        Run(text, "plain-loop", text, text, "all", "failed", failed_step=2, error=text, node=node),
        Run(text, "held-loop", text, text, "all", "skipped", reason=text),
        Run(text, text, text, text, "all", "died", reason=text),
    )
    axes: tuple[Axis, ...] = ("batch", "kv_heads", "past", "head_dim")
    port = Port(text, "float", (1, 2, text, 4), "past", axes)
    graph = Graph(text, (port,), (replace(port, role="present"),))
    slot = Slot("self-attention", 0, "key", "float", (1, 2, text, 4), axes, text, text, text, "feed-back")
    contract = CacheContract(
        text, {text: graph}, {"prefill": Phase(text), "decode": Phase(text)}, (slot,), "empty-past"
    )
    file = FileFacts(
        text, "decoder", 1, None, 8, {text: 1}, text, (text,), ({"name": text, "dtype": text, "shape": [text]},)
    )
    return Report(
        command="re-export",
        arguments={"fail_on": "error"},
        seed=0,
        verdict="unhealthy",
        environment={"onnx": text},
        model=ModelFacts(text, (file,)),
        stacks=(StackFacts(text, text, (text,), contract),),
        runs=runs,
        findings=(found, *notes),
        not_checked=(
            NotChecked(text, "KV301", text),
            NotChecked(None, "*", text, essential=True),
            NotChecked(text, text, text),
        ),
        repair=_repaired(text, found),
        notes=(text,),
    )


def _repaired(text: str, found: Finding) -> RepairRecord:
    return RepairRecord(
        source=text,
        out=text,
        changes=tuple(Change(text, text, text, text) for _ in range(3)),
        before=RepairSide("unhealthy", (found,)),
        after=RepairSide("unhealthy", (found,)),
        proof=(Proof(text, text, False, text),),
        advice=(text,),
        repairs=(AppliedRepair(text, text, (text,), text, text),),
        not_repaired=(NotRepaired(text, text, text, text, text),),
        undo=(text,),
    )
