"""Where segments go that turn out bad: the newest few stay to be looked at, each with the reason in a file beside it."""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)
QUARANTINE_FILES = 16
QUARANTINE_BYTES = 256 << 20
"""What is kept of bad files, beside the budget; at least the newest one stays."""


class Quarantine:
    """folder: on the same file system as what it takes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def make(self) -> None:
        """Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)

    def take(self, path: Path, reason: str, name: str) -> None:
        """Move a file here under a name. One that cannot be moved stays where it is."""
        log.warning("segment set aside file=%s reason=%s", name, reason)
        target = self._folder / name
        try:
            path.rename(target)
            target.with_suffix(".reason").write_text(reason + "\n")
            self._shorten()
        except FileNotFoundError:  # somebody else deleted it: there is nothing to move
            return
        except OSError as failure:
            log.warning("segment not moved file=%s reason=%s", name, failure.strerror)

    def _shorten(self) -> None:
        kept = sorted(self._folder.glob("*.safetensors"), key=lambda p: p.stat().st_mtime_ns, reverse=True)
        total = 0
        for number, path in enumerate(kept):
            total += path.stat().st_size
            if number and (number >= QUARANTINE_FILES or total > QUARANTINE_BYTES):
                path.unlink(missing_ok=True)
                path.with_suffix(".reason").unlink(missing_ok=True)
