"""Abstract runs: a graph is computed with one number in place of each feature axis, without weights or a runtime.

Lengths (batch, past, new tokens, encoder states), positions, masks and all other integers are exact. The axes that
count features (hidden, heads, head width, vocabulary) are collapsed: one number is broadcast along each, and a weight
is one number made from its name. Such a run costs about as much as reading the graph, shows every size that cannot
agree, and shows which tokens reach which logits and cache entries. What an operator returns that is not known here is
unknown, and so is all that is computed from it.
"""
