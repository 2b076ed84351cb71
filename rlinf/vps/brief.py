"""Publications on their way: what readers know already is not sent again.

A publication says what lies where for every tensor of the model, and that is the same from sync to sync. It goes along
the first time, and when it has changed; in between its hash stands for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf.vps.layout import RankLayout
from rlinf.vps.memory import Handle
from rlinf.vps.publication import Description, Publication
from rlinf.vps.space import LayoutError


@dataclass(frozen=True)
class Brief:
    """A `Publication` whose description its reader has.

    Attributes:
        described: hash of the description.
        handle, changed, inline, digests: as in `Publication`.
    """

    described: str
    handle: Handle
    changed: bool
    inline: np.ndarray | None = None
    digests: tuple[int, ...] | None = None


class Told:
    """What readers have been told. Readers under one name must get everything that goes to that name, in order."""

    def __init__(self) -> None:
        self._last: dict[Hashable, str] = {}

    def brief(self, readers: Hashable, published: Any) -> Any:
        """What to send to some readers. Other things than publications go as they are."""
        if not isinstance(published, Publication):
            return published
        described = published.description.hash
        if self._last.get(readers) != described:
            self._last[readers] = described
            return published
        return Brief(described, published.handle, published.changed, published.inline, published.digests)


class Heard:
    """A reader's side of `Told`."""

    def __init__(self) -> None:
        self._last: dict[Hashable, Description] = {}

    def whole(self, source: Hashable, item: Any) -> Any:
        """The publication that a source sent.

        Raises:
            LayoutError: it is brief about what the source never described.
        """
        if isinstance(item, Publication):
            # Copied: what stays for all syncs must not hold on to the message, with all its bytes, that it came in.
            self._last[source] = Description(item.space, RankLayout(item.layout.pieces.copy(), item.layout.buffers))
            return replace(item, description=self._last[source])
        if not isinstance(item, Brief):
            return item
        known = self._last.get(source)
        if known is None or known.hash != item.described:
            raise LayoutError(
                f"{source} published weights laid out as {item.described}, and this reader "
                f"{'knows of no layout' if known is None else f'knows {known.hash}'}: it missed a publication"
            )
        return Publication(known, item.handle, item.changed, item.inline, item.digests)
