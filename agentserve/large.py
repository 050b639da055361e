"""Large messages are read on a thread of their own, so that whoever is served beside them is not kept waiting.

Decoding holds the interpreter lock within each of its calls (protocol/pieces.py keeps them short); between them the thread that
serves everybody gets its turn. One thread: more would queue in front of that one.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 << 10
"""A message of less is read within 2 ms, sooner than another thread would get to it."""


SWITCH_S = 0.001
"""How long another thread may go on once the one that serves everybody wants the interpreter. By Python's own 5 ms that one
waits several times in each step of the worker while a large message is read or rendered."""


def switch_often() -> None:
    """Make it so, for the whole process."""
    sys.setswitchinterval(SWITCH_S)


def reader() -> Executor:
    """The thread; it is started with the first large message."""
    return ThreadPoolExecutor(1, thread_name_prefix="read")


async def read_beside(thread: Executor, size_bytes: int, read: Callable[[], T]) -> T:
    """What `read` returns, which looks at a message of this size."""
    if size_bytes < LARGE_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(thread, read)
