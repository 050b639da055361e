"""Logging of a process, server or worker: one event per line, stable key=value, to standard error.

What never goes in: prompts, output, tool results, tokens, and messages of client errors (they may quote the client).
"""

from __future__ import annotations

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s"
_OURS = ("agentserve", "engine", "statecache")
_QUIET = ("uvicorn", "uvicorn.error", "uvicorn.access", "websockets", "websockets.server", "asyncio", "sqlalchemy")

MAX_PLACES = 24
"""Frames named of one traceback; endless recursion has a thousand."""


class OneLine(logging.Formatter):
    """Keeps an event on one line: a traceback is given as its frames' places, without the values in them."""

    def formatException(self, ei: Any) -> str:
        kind, _, trace = ei
        places = []
        while trace is not None:
            places.append(f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}")
            trace = trace.tb_next
        if len(places) > MAX_PLACES:
            places = [*places[: MAX_PLACES // 2], f"{len(places) - MAX_PLACES} more", *places[-MAX_PLACES // 2 :]]
        return f"error={getattr(kind, '__name__', kind)} at={'>'.join(places)}"

    def format(self, record: logging.LogRecord) -> str:
        # Another handler's formatter may have left its own rendering of the exception, with the message in it.
        kept, record.exc_text = record.exc_text, None
        try:
            return " ".join(super().format(record).splitlines())
        finally:
            record.exc_text = kept


def setup(level: str = "INFO") -> None:
    """Send our packages' events to standard error. Libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLine(FORMAT, "%Y-%m-%dT%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
