"""Who sends an adapter to whom: a tree over the members, with the trainer at its root.

A member passes bytes on while they still arrive, so that the whole tree receives at the rate of one
connection. The source sends to at most FAN_OUT members, whatever their number, and so does each
member. Pure: no I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

FAN_OUT = 2

SOURCE = ""
"""Stands for the trainer in place of a member."""


class RelayTree:
    """Who receives from whom, and new senders when members fail.

    Args:
      targets: the receivers, nearest to the source first.
      source: a member that has the files already, or SOURCE.
    """

    def __init__(self, targets: Iterable[str], source: str = SOURCE) -> None:
        self._source = source
        self._children: dict[str, list[str]] = {source: []}
        self._sender: dict[str, str] = {}
        for target in targets:
            self._attach(target, frozenset())

    def sender(self, target: str) -> str:
        """The member that `target` receives from, or SOURCE. Raises KeyError after its failure."""
        return self._sender[target]

    def fail(self, target: str) -> list[str]:
        """Takes a member out that cannot receive. Returns the members with a new sender.

        Each takes the free place nearest to the source and keeps its own receivers.
        """
        if target not in self._sender:
            return []
        self._detach(target)
        del self._sender[target]
        moved = self._children.pop(target)
        # All are off the tree first: none may hang below another one that has lost its way.
        for orphan in moved:
            del self._sender[orphan]
        for orphan in moved:
            self._attach(orphan, frozenset())
        return moved

    def move(self, target: str, avoid: Iterable[str]) -> bool:
        """Gives `target` a sender outside `avoid`. False when there is none."""
        old = self._sender[target]
        self._detach(target)
        try:
            self._attach(target, frozenset(avoid))
        except LookupError:
            self._children[old].append(target)
            self._sender[target] = old
            return False
        return True

    def _detach(self, target: str) -> None:
        self._children[self._sender[target]].remove(target)

    def _attach(self, target: str, avoid: frozenset[str]) -> None:
        # Breadth first, so that paths are short. A detached subtree is not reached: no cycles.
        queue = deque([self._source])
        while queue:
            at = queue.popleft()
            if len(self._children[at]) < FAN_OUT and at not in avoid:
                self._children[at].append(target)
                self._children.setdefault(target, [])
                self._sender[target] = at
                return
            queue.extend(self._children[at])
        raise LookupError("no other sender is left")
