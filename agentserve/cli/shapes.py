"""How commands show sizes, ages and tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table


def size(nbytes: int) -> str:
    """In the largest unit of which there is one: `212.7 KiB`."""
    for power, unit in enumerate(("B", "KiB", "MiB")):
        if nbytes < 1024 ** (power + 1):
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes / 1024**3:.4g} GiB"


def many(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def ago(at: float) -> str:
    """at: Unix seconds."""
    seconds = max(0, int(time.time() - at))
    for unit, length in (("days", 86_400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit} ago"
    return f"{seconds} s ago"


def table(*columns: str, left: Sequence[str]) -> Table:
    """left: columns of words, the others hold numbers. Nothing is cut: seven columns fit into eighty characters."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=True, overflow="fold")
    return made
