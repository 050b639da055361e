"""The state directory: made if absent, and held by one server at a time, before that one touches anything else in it.

The lock is the kernel's (flock) and ends with its process, however that ends; a worker that outlives it does not have it. What
the file says, the server's name and who holds it, is for the next one that comes. Holds nothing else of the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from agentserve.errors import ConfigError

LOCK = "server.lock"


def make_state_dir(path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the state directory {path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class StateDir:
    """A state directory that this process alone serves from. server: its name among those that share a database, for ever."""

    path: Path
    server: str
    descriptor: int

    @classmethod
    def claim(cls, path: Path, address: str) -> StateDir:
        """Make the directory if absent and lock it, without waiting. address: where this server is going to listen.

        Raises ConfigError that names the directory, and the holder if it is another server.
        """
        make_state_dir(path)
        try:
            descriptor = _locked(path / LOCK)
        except OSError as error:
            raise ConfigError(f"the state directory {path} cannot be used: {LOCK}: {error.strerror}") from error
        if descriptor is None:
            other = "stop it, or choose another: --state-dir, --port"
            raise ConfigError(f"the state directory {path} is used by {_holder(path)}; {other}")
        try:
            lines = os.pread(descriptor, 4096, 0).decode(errors="replace").splitlines()
            held = cls(path, lines[0] if lines and lines[0] else secrets.token_hex(16), descriptor)
            held.say(address)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"the state directory {path} cannot be written: {LOCK}: {error.strerror}") from error
        return held

    def say(self, address: str) -> None:
        """Tell others where this server listens. Raises OSError."""
        text = f"{self.server}\n{os.getpid()}\n{address}\n".encode()
        os.pwrite(self.descriptor, text, 0)
        os.ftruncate(self.descriptor, len(text))

    def release(self) -> None:
        """Once, at the end."""
        os.close(self.descriptor)


def _locked(file: Path) -> int | None:
    """A descriptor that holds the lock of the file that has this name now; None if another process has it. Raises OSError."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:  # deleted since it was opened
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _holder(path: Path) -> str:
    """Who holds the lock, by what it wrote."""
    with contextlib.suppress(OSError):
        lines = (path / LOCK).read_text(errors="replace").splitlines()
        if len(lines) >= 3:
            return f"another server: process {lines[1]} on {lines[2]}"
    return "another server, which is just starting"
