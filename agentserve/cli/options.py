"""Flags that several commands share, and settings made from them. See agentserve/config.py for what each setting means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from agentserve.config import Config


def path(text: str) -> Path:
    """Of an option. A variable of the shell that is not set must not mean the folder one happens to stand in."""
    if not text:
        raise typer.BadParameter("is empty")
    return Path(text)


def folder(text: str) -> Path:
    """The same of one that must be there."""
    if not path(text).is_dir():
        raise typer.BadParameter(f"{text}: no such directory")
    return Path(text)


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        parser=path,
        help="TOML file with settings (docs/settings.md); flags and AGENTSERVE_* variables win over it.",
        metavar="FILE",
    ),
]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        parser=path,
        help="Where databases, the token and checkpoints are kept. Default: ~/.local/state/agentserve.",
        metavar="DIR",
    ),
]
Model = Annotated[
    Path | None,
    typer.Option(
        "--model", "-m", parser=path, help="Hugging Face checkpoint directory. Default: the embedded demo model.", metavar="DIR"
    ),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option("--port", "-p", help="Port to listen on, 0 for any free one. Default: 8741.")]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database-url", help="SQLAlchemy URL of the sessions database. Default: SQLite in the state directory."),
]


def settings(file: Path | None, flags: Mapping[str, Any]) -> Config:
    """Settings from file, environment and flags (None = not given). Ends the command with status 2 if one is bad."""
    from agentserve.config import load
    from agentserve.errors import ConfigError

    given = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items() if value is not None}
    try:
        return load(file, given)
    except ConfigError as error:
        fail(str(error), status=2)


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Say why on standard error and end the command."""
    typer.secho(f"agentserve: {message}", err=True, fg="red")
    raise typer.Exit(status)
