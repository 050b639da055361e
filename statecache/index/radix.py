"""The index in memory: per salt a radix tree over token ids with checkpoints as marks on its edges.

An edge is split only where two contexts part, not at checkpoints, so a session of thousands of turns stays a handful of edges
and following 100k tokens is a few memory comparisons. Holds no state bytes and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np

from statecache.keys import KEY_BYTES
from statecache.types import BLOCK_TOKENS

OTHER_SALTS_TRIED = 32


class Node:
    """An edge from its parent: tokens [start, end) of every path through it.

    keys: of the blocks that end in (start, end]. positions (rising) and marks: checkpoints with start < position ≤ end.
    """

    __slots__ = ("children", "ids", "keys", "marks", "parent", "positions", "salt", "start")

    def __init__(self, salt: bytes, parent: Node | None, start: int, ids: bytes, keys: bytes) -> None:
        self.salt = salt
        self.parent = parent
        self.start = start
        self.ids = ids
        self.keys = keys
        self.children: dict[bytes, Node] = {}
        self.positions: list[int] = []
        self.marks: list[str] = []

    @property
    def end(self) -> int:
        return self.start + len(self.ids) // 4

    def keys_until(self, position: int) -> bytes:
        """Keys of its blocks that end at or before `position`."""
        return self.keys[: max(0, position // BLOCK_TOKENS - self.start // BLOCK_TOKENS) * KEY_BYTES]


class RadixWalk:
    """See index.base.Walk. nodes: from the root; the last one may be covered only up to `depth`."""

    __slots__ = ("_nodes", "_tip", "depth")

    def __init__(self, nodes: list[Node], depth: int) -> None:
        self._nodes = nodes
        self.depth = depth
        last = nodes[-1] if nodes else None
        self._tip = last is None or (depth == last.end and not last.children)

    @property
    def tip(self) -> bool:
        return self._tip

    def marks(self, limit: int) -> Iterator[tuple[int, str]]:
        limit = min(limit, self.depth)
        for node in reversed(self._nodes):
            for i in range(bisect_right(node.positions, limit) - 1, -1, -1):
                yield node.positions[i], node.marks[i]

    def at(self, position: int) -> str | None:
        first = next(self.marks(position), None)
        return first[1] if first is not None and first[0] == position else None

    def keys(self) -> bytes:
        return b"".join(node.keys_until(self.depth) for node in self._nodes)


class RadixIndex:
    """See index.base.Index."""

    def __init__(self) -> None:
        self._roots: dict[bytes, Node] = {}
        self._where: dict[str, tuple[Node, int]] = {}
        self._tokens = 0
        self._walked: tuple[bytes, bytes, RadixWalk] | None = None
        """The last answer of walk(), good until something changes: whoever saves a state asks for the same several times."""

    @property
    def tokens(self) -> int:
        return self._tokens

    def __len__(self) -> int:
        return len(self._where)

    def knows(self, mark: str) -> bool:
        return mark in self._where

    def walk(self, salt: bytes, ids: bytes) -> RadixWalk:
        last = self._walked
        if last is not None and last[1] == ids and last[0] == salt:
            return last[2]
        root = self._roots.get(salt)
        walk = RadixWalk([], 0) if root is None else RadixWalk(*_follow(root, ids))
        self._walked = salt, ids, walk
        return walk

    def agrees_elsewhere(self, salt: bytes, ids: bytes) -> Iterator[RadixWalk]:
        tried = 0
        for other, root in self._roots.items():
            if other == salt:
                continue
            tried += 1
            if tried > OTHER_SALTS_TRIED:
                return
            yield RadixWalk(*_follow(root, ids))

    def add(self, salt: bytes, ids: bytes, keys: bytes, mark: str) -> None:
        position = len(ids) // 4
        self._walked = None
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(salt, None, 0, b"", b"")
        nodes, depth = _follow(root, ids)
        node = nodes[-1]
        known = self._where.get(mark)
        if known is not None:
            if depth == position and known == (node, position):
                return
            raise ValueError(f"checkpoint {mark} is already marked at another place")
        if depth < position:
            if depth < node.end:
                node = self._split(node, depth)
            new_keys = keys[(depth // BLOCK_TOKENS) * KEY_BYTES : (position // BLOCK_TOKENS) * KEY_BYTES]
            new_ids = ids[4 * depth :]
            if node.parent is not None and not node.children:
                node.ids += new_ids
                node.keys += new_keys
            else:
                child = Node(salt, node, depth, new_ids, new_keys)
                node.children[new_ids[:4]] = child
                node = child
            self._tokens += position - depth
        i = bisect_left(node.positions, position)
        if i < len(node.positions) and node.positions[i] == position:
            raise ValueError(f"position {position} of this path is already marked {node.marks[i]}")
        node.positions.insert(i, position)
        node.marks.insert(i, mark)
        self._where[mark] = (node, position)

    def remove(self, mark: str) -> None:
        place = self._where.pop(mark, None)
        if place is None:
            return
        self._walked = None
        node, position = place
        i = bisect_left(node.positions, position)
        del node.positions[i], node.marks[i]
        self._trim(node)

    def above(self, mark: str) -> Iterator[tuple[int, str]]:
        place = self._where.get(mark)
        if place is None:
            return
        node: Node | None = place[0]
        below = place[1]
        while node is not None:
            for i in range(bisect_left(node.positions, below) - 1, -1, -1):
                yield node.positions[i], node.marks[i]
            node = node.parent

    def _split(self, node: Node, at: int) -> Node:
        """Cut an edge at `at`; returns the new upper part."""
        parent = node.parent
        assert parent is not None
        assert node.start < at < node.end
        upper_keys = node.keys_until(at)
        cut = 4 * (at - node.start)
        upper = Node(node.salt, parent, node.start, node.ids[:cut], upper_keys)
        parent.children[upper.ids[:4]] = upper
        node.ids = node.ids[cut:]
        node.keys = node.keys[len(upper_keys) :]
        node.start = at
        node.parent = upper
        upper.children[node.ids[:4]] = node
        i = bisect_right(node.positions, at)
        upper.positions, node.positions = node.positions[:i], node.positions[i:]
        upper.marks, node.marks = node.marks[:i], node.marks[i:]
        self._place(upper)
        return upper

    def _trim(self, node: Node) -> None:
        """Drop tokens that no mark needs any more, and join an edge with an only child."""
        while not node.children:
            parent = node.parent
            if parent is None:
                del self._roots[node.salt]
                return
            needed = node.positions[-1] if node.positions else node.start
            self._tokens -= node.end - needed
            if needed > node.start:
                node.keys = node.keys_until(needed)
                node.ids = node.ids[: 4 * (needed - node.start)]
                return
            del parent.children[node.ids[:4]]
            node = parent
        if len(node.children) == 1 and node.parent is not None:
            (child,) = node.children.values()
            node.ids += child.ids
            node.keys += child.keys
            node.positions += child.positions
            node.marks += child.marks
            node.children = child.children
            for grandchild in node.children.values():
                grandchild.parent = node
            self._place(node)

    def _place(self, node: Node) -> None:
        for mark, position in zip(node.marks, node.positions, strict=True):
            self._where[mark] = (node, position)


def _follow(root: Node, ids: bytes) -> tuple[list[Node], int]:
    """Nodes on the way and the number of tokens that agree."""
    nodes = [root]
    node, at, size = root, 0, len(ids)
    while at < size:
        child = node.children.get(ids[at : at + 4])
        if child is None:
            break
        nodes.append(child)
        span = min(len(child.ids), size - at)
        mine = ids[at : at + span]
        theirs = child.ids if span == len(child.ids) else child.ids[:span]
        if mine != theirs:
            differ = np.frombuffer(mine, dtype="<u4") != np.frombuffer(theirs, dtype="<u4")
            return nodes, at // 4 + int(differ.argmax())
        at += span
        if span < len(child.ids):
            break
        node = child
    return nodes, at // 4
