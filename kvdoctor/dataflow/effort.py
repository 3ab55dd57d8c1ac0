"""How much is looked at, in one walk and in all of them, before a graph is given up."""

from dataclasses import dataclass

MOST_VISITED = 4000
"""Values that one walk looks at before it gives up: the attention of a state is near to it."""

NEAR = 64
"""Values that are looked at where an answer, if there is one, is next door."""

MOST_LOOKS = 300_000
"""Values that all walks over one graph look at together, where a layer takes 30: thousands of inputs on one long chain
would take minutes.
"""


@dataclass
class Effort:
    """Counts the values that all walks over one graph look at."""

    looked: int = 0

    def goes_on(self) -> bool:
        """Count one more; False once there were MOST_LOOKS."""
        self.looked += 1
        return not self.gave_up

    @property
    def gave_up(self) -> bool:
        """Whether walks were ended because there were too many."""
        return self.looked > MOST_LOOKS
