"""Keeps Python's cyclic garbage collector from stopping a process that streams, and from slowing one that starts.

A full collection looks at every object there is. What a process loads and never gives back (modules, templates, a model) is
most of them: 120 ms in the server and 190 ms in a worker on a busy two-core machine, in the middle of everybody's answers.
While it is loaded, collections look at it again and again and find nothing: a tenth of what a start takes.
"""

from __future__ import annotations

import gc


def put_off() -> None:
    """No collections until `keep_loaded`. At the beginning of a process, before what is large is imported."""
    gc.disable()


def keep_loaded() -> None:
    """What is there now stays for good and is never looked at again; later objects are collected as ever."""
    gc.collect()
    gc.freeze()
    gc.enable()
