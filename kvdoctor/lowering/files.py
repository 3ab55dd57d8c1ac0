"""Which files of an export ask for more than is wanted."""

from kvdoctor.graph import GraphView
from kvdoctor.lowering import Wanted
from kvdoctor.targets.demands import demands


def asks_more(view: GraphView, want: Wanted) -> bool:
    """Whether a graph asks for more than a model may."""
    asked = demands(view)
    too_new = (want.ir is not None and asked.ir > want.ir) or (want.opset is not None and asked.opset > want.opset)
    return too_new or bool(want.lacks & asked.features.keys())
