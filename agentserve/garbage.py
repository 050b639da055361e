"""Keeps Python's cyclic garbage collector from stopping a process that streams.

A full collection looks at every object there is. What a process loads and never gives back (modules, templates, a model) is
most of them: 120 ms in the server and 190 ms in a worker on a busy two-core machine, in the middle of everybody's answers.
"""

from __future__ import annotations

import gc


def keep_loaded() -> None:
    """What is there now stays for good and is never looked at again; later objects are collected as ever."""
    gc.collect()
    gc.freeze()
