"""The draft of speculative decoding in words: how many of its tokens are accepted."""

from collections.abc import Iterator

from kvdoctor.report.document import Report
from kvdoctor.report.facts import DraftFacts
from kvdoctor.report.wording.units import format_count

GROUP = 4
"""Drafts of a group in the example; programs take 3 to 8."""


def describe_drafts(report: Report) -> Iterator[str]:
    """A line for each stack that a draft was compared with."""
    for one in report.drafts:
        yield f"draft {one.draft} for {one.stack}: {_describe(one)}"


def _describe(one: DraftFacts) -> str:
    if one.reason is not None or not one.tokens:
        return f"not compared: {one.reason}"
    share = one.accepted / one.tokens
    prompts = "the prompt given" if one.given else format_count(one.prompts, "random prompt")
    text = f"{one.accepted} of {one.tokens} tokens are accepted ({share:.0%}), decoded greedily from {prompts}"
    return f"{text}; groups of {GROUP} drafts then give {expected_tokens(share, GROUP):.1f} tokens a call"


def expected_tokens(share: float, drafts: int) -> float:
    """The tokens that one call of the model gives on average, where each draft is accepted with that probability.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return float(drafts + 1) if share == 1 else (1 - share ** (drafts + 1)) / (1 - share)
