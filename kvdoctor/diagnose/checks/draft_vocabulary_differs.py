"""The vocabulary of the draft of speculative decoding differs from that of the model.

What it means: speculative decoding feeds the token ids of the draft to the model, so both must mean the same token by
the same id. With different ids the model refuses almost every draft, and ids that it does not have fail, or read past
the end of its table.

How it is decided: by the size of the logits of both, and by the tokenizer.json of both. Where the two files agree
and the logits differ in size, one of them is padded: a warning, since programs compare the sizes.

Reproduce: `kvdoctor step-test MODEL --draft DRAFT`.

Repair: take a draft of the same family, with the same tokenizer.

Source: speculative decoding, Leviathan et al. 2023 (arXiv 2211.17192): the distributions of both are compared token by
token.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, check

TAKE_ANOTHER = "take a draft with the same tokenizer, of the same family of models"
PADDED = "feed only ids below both sizes, and cut the larger logits before they are compared"


@check("KV022", "draft-vocabulary-differs", "contract")
def draft_vocabulary_differs(context: ContractContext) -> Iterator[Fault]:
    """A different number of logits, or different tokens by the same ids."""
    draft = context.draft
    if draft is None:
        return
    from kvdoctor.diagnose.graded_models import find_other_token, read_tokens

    ours, theirs, name = context.contract.vocabulary, draft.contract.vocabulary, context.logits_name
    fault = Fault("error", (name,), "the vocabulary of the draft differs", Advice("caller", TAKE_ANOTHER))
    fault = fault.also(where=f"output {name}, --draft {draft.shown}")
    mine = read_tokens(context.folder.root)
    agree = mine is not None and draft.tokens is not None
    if mine is not None and draft.tokens is not None and (other := find_other_token(mine, draft.tokens)) is not None:
        here, there = (ascii(token) if token else "no token" for token in other[1:])
        words = f"id {other[0]} is {here} in the model, {there} in the draft"
        yield fault.compare("the same tokens by the same ids (tokenizer.json)", words)
    elif ours is not None and theirs is not None and ours != theirs:
        if agree:
            cause, advice = "the logits of the draft are padded to a different size", Advice("caller", PADDED)
            fault = fault.also(severity="warning", cause=cause, repair=advice)
        yield fault.compare("as many logits in both", f"{ours} logits in the model, {theirs} in the draft")
