"""The project's policy: what it asks of its models, said once in a file instead of at each call.

Its keys are in `keys.py`, how it is found and read in `reading.py`, what holds for a model in `holding.py`.
"""

from kvdoctor.policy.holding import DEFAULT, SAID, Override, Policy, Value
from kvdoctor.policy.keys import BY_NAME, KEYS, Key
from kvdoctor.policy.reading import find_policy, read_policy

__all__ = ("BY_NAME", "DEFAULT", "KEYS", "SAID", "Key", "Override", "Policy", "Value", "find_policy", "read_policy")
