"""The project's policy: its requirements for its models, written once in a file instead of at each call.

Its keys are those of `kvdoctor.options`. `reading` finds and reads the file, `patterns` matches paths, `precedence`
says which value applies to a model. It must not know the command line.
"""

from kvdoctor.gating.policy.precedence import DEFAULT, SAID, EffectiveValue, Override, Policy
from kvdoctor.gating.policy.reading import find_policy, read_policy

__all__ = ("DEFAULT", "SAID", "EffectiveValue", "Override", "Policy", "find_policy", "read_policy")
