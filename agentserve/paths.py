"""Paths among the settings: which can be used, how they become the address of a database, and files for their owner alone."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentserve.errors import ConfigError


def sqlite_at(file: Path) -> str:
    """The SQLAlchemy URL of a SQLite file. A path may have characters that mean something in a URL: `?`, `%`, `#`."""
    return "sqlite:///" + quote(str(file), safe=" +/")


def check_texts(values: Any, origin: str, name: str = "") -> None:
    """Raises ConfigError that names a setting whose text no file and no process can be given: bytes that are no UTF-8, a NUL.

    They come from command lines and the environment, where a path may be any bytes.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            check_texts(value, origin, f"{name}.{key}" if name else str(key))
    elif isinstance(values, list | tuple):
        for number, value in enumerate(values):
            check_texts(value, origin, f"{name}[{number}]")
    elif isinstance(values, str):
        if "\0" in values:
            raise ConfigError(f"bad setting in {origin}: {name}: has a NUL character")
        try:
            values.encode()
        except UnicodeEncodeError as error:
            at = f"character {error.start} of {len(values)}"
            raise ConfigError(f"bad setting in {origin}: {name}: is not UTF-8 ({at})") from None


def make_private(path: Path, content: bytes) -> bool:
    """Make a file that only its owner can read: whole, or not at all. Its folder is made if absent. Raises OSError.

    False if there is one by now: of several that begin at the same moment one makes it, and the others have to read it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by the process's number: in containers all are alike.
    beside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(handle)
        try:
            os.link(beside, path)
        except FileExistsError:
            return False
        except OSError:
            if path.exists():
                return False
            beside.rename(path)  # a file system without links
        return True
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
