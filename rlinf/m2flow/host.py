"""The built-in group that runs sources and maps: one rank, no device."""

from __future__ import annotations

from typing import Any

from rlinf.m2flow.graph import Graph, Source
from rlinf.worker import RankContext, Worker


class Host(Worker):
    """Its config is the graph. Its state is the cursor of every source."""

    uses_device = False

    def __init__(self, cfg: Graph, ctx: RankContext) -> None:
        super().__init__(cfg, ctx)
        self.sources: dict[str, Source] = {
            node.name: node.call for node in cfg.nodes if node.call is not None and isinstance(node.call, Source)
        }

    def setup(self) -> None:
        for source in self.sources.values():
            source.setup()

    def reports(self) -> list[str]:
        """What each source says about itself (rows kept, left out, and why), where it has a ``report``."""
        found = [str(source.report) for source in self.sources.values() if hasattr(source, "report")]
        return list(dict.fromkeys(found))

    def state(self) -> dict[str, Any]:
        return {name: source.state() for name, source in self.sources.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, source in self.sources.items():
            source.load_state(state[name])
