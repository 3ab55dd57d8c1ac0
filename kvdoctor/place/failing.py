"""Which node of a graph fails in a call: the one that the runtime names, proved by running all that comes before."""

from dataclasses import dataclass
from pathlib import Path

from kvdoctor.place.bench import Bench, NoPlace, TrialFailed
from kvdoctor.place.flat import Flat, FlatNode, NotFlat, flatten

MOST_ROUNDS = 6
"""Times that a branch which a failing `If` takes is written out, or another node is seen to fail first."""


@dataclass
class Failing:
    """The search in one kept call: `source` is the file that failed, `feeds` the call, `taken` the branches known."""

    bench: Bench
    source: Path
    feeds: Path
    taken: dict[str, bool]

    def node(self) -> tuple[Flat, FlatNode]:
        """The graph, written out as deep as the node lies, and the node.

        Raises:
            NoPlace: it cannot be found.
        """
        for _ in range(MOST_ROUNDS):
            flat = written_out(self.bench, self.source, self.taken)
            node = self._first(flat)
            branch = self._branch_taken(flat, node)
            if branch is None:
                return flat, node
            self.taken[node.makes[0]] = branch
        raise NoPlace("the failing node lies deeper than branches were written out")

    def _first(self, flat: Flat) -> FlatNode:
        """The first node that fails."""
        wanted = flat.ends
        for _ in range(MOST_ROUNDS):
            node = self._fails_in(flat, wanted)
            if node is None:
                raise NoPlace("the same call passes where branches and functions are written out")
            wanted = [name for name in node.reads if name in flat.producers]
            if not wanted or self._fails_in(flat, wanted) is None:
                return node
        raise NoPlace("no single node fails each time")

    def _fails_in(self, flat: Flat, wanted: list[str]) -> FlatNode | None:
        """The node that fails while some values are computed, None where all can be."""
        try:
            self.bench.run(self.bench.variant(flat, self.source, shapes=wanted), self.feeds)
        except TrialFailed as failure:
            named = [flat.by_name[name] for name in failure.names if name in flat.by_name]
            return named[-1] if named else self._halved(flat, wanted)
        return None

    def _halved(self, flat: Flat, wanted: list[str]) -> FlatNode:
        """The runtime names no node: halve the graph until one is left."""
        nodes = flat.before(wanted)
        runs, fails = 0, len(nodes)
        while fails - runs > 1:
            middle = (runs + fails) // 2
            values = [name for node in nodes[:middle] for name in node.makes]
            try:
                self.bench.run(self.bench.variant(flat, self.source, shapes=values), self.feeds)
                runs = middle
            except TrialFailed:
                fails = middle
        if not nodes:
            raise NoPlace("the runtime fails before any node")
        return nodes[fails - 1]

    def _branch_taken(self, flat: Flat, node: FlatNode) -> bool | None:
        """Which branch a failing `If` takes; None for other nodes."""
        if node.op != "If" or node.domain or not node.makes:
            return None
        condition = node.proto.input[0]
        variant = self.bench.variant(flat, self.source, values=[condition])
        numbers = self.bench.run(variant, self.feeds)[condition].get("values")
        return bool(numbers[0]) if numbers else None


def written_out(bench: Bench, source: Path, taken: dict[str, bool]) -> Flat:
    """The flat graph of a file.

    Raises:
        NoPlace: it cannot be written out.
    """
    try:
        return flatten(bench.model(source), taken)
    except NotFlat as error:
        raise NoPlace(str(error)) from None
