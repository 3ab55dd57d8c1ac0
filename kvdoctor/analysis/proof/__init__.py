"""Proofs that decoding with a cache and without one agree at every length, by position types and without a run.

`prove` walks over the graphs of a stack and gives each value a type (`types`), by the rules of its operator. What has
no type stays with the runs: a proof says what holds, and never that something is wrong.
"""

from kvdoctor.records import record


@record
class Proof:
    """What is proved of one stack.

    Attributes:
        up_to: the most tokens of a sequence that it holds for; null where no table ends.
        table: the table that ends there; empty where none does.
        single: whether it holds for one new token on a past alone.
        exceptions: what is not proved: the node or value that is the reason.
        weak_mask: whether a mask adds a number of moderate size to scores, as -10,000: it hides what is far above that.
        rounded: whether each call rounds activations to integers by a scale of its own, which no proof includes.
        one_row: whether several new tokens on a past are those of one sequence, as GroupQueryAttention takes them.
    """

    up_to: int | None = None
    table: str = ""
    single: bool = False
    exceptions: tuple[str, ...] = ()
    weak_mask: bool = False
    rounded: bool = False
    one_row: bool = False

    @property
    def holds(self) -> bool:
        """Whether something is proved."""
        return not self.exceptions or self.single

    def covers(self, limit: int | None) -> bool:
        """Whether no call of a sequence is left to runs, without padding; `limit` is the most tokens that it may have.

        A mask of moderate size hides no score that comes near it, and integers round: that stays with the runs.
        """
        whole = not self.exceptions and not self.weak_mask and not self.rounded
        return whole and (self.up_to is None or (limit is not None and self.up_to >= limit))
