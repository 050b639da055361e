"""`agentserve launch`: set a coding agent up for this server, or start it so. Installs nothing and runs no remote script."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentserve.cli import options

if TYPE_CHECKING:
    from agentserve.cli.client_configs import ClientConfig
    from agentserve.cli.connect import Target


def launch(
    client: Annotated[str, typer.Argument(help="codex, claude or opencode", metavar="CLIENT")],
    arguments: Annotated[list[str] | None, typer.Argument(help="For the client, behind `--`; with --run.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Merge it into the client's file, which keeps all else.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Start the installed client so; no file is written for that.")] = False,
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
    url: Annotated[
        str | None,
        typer.Option(help="Server, e.g. http://127.0.0.1:8741. Default: from the settings.", envvar="AGENTSERVE_URL"),
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Token. Default: the local server's token file.", envvar="AGENTSERVE_TOKEN")
    ] = None,
) -> None:
    """Show what a coding agent needs to use this server; `--write` puts it in place, `--run` starts the agent with it.

    Asks the server first whether it answers and which model it serves.
    """
    from agentserve.cli.chat import find_target
    from agentserve.cli.client_configs import CLIENTS, Place
    from agentserve.cli.connect import Unreachable

    if client not in CLIENTS:
        options.fail(f"unknown client '{client[:64]}'; accepted: {', '.join(CLIENTS)}", status=2)
    if arguments and not run:
        options.fail("arguments for the client have a meaning only with --run", status=2)
    target = find_target(config, state_dir, url, token)
    try:
        model = target.get("/v1/models")["data"][0]
    except Unreachable as error:
        options.fail(error.advice)
    kept = _token_file(config, state_dir, target)
    place = Place(target.url, model["id"], int(model.get("context_length") or 0) or 32_768, kept)
    wanted = CLIENTS[client](place, Path.home(), os.environ)
    if run:
        _run(wanted, target, arguments or [])
    elif write:
        _write(wanted)
        _say_how(wanted, kept)
    else:
        typer.secho(f"# {wanted.path}", fg="bright_black", err=True)
        typer.echo(_text(wanted, _before(wanted)).rstrip())
        _say_how(wanted, kept)
        typer.secho(
            "Nothing was written: --write writes that file, --run starts the client without one.", fg="bright_black", err=True
        )


def _token_file(config: Path | None, state_dir: Path | None, target: Target) -> Path | None:
    """The local server's, if it holds the token that is used."""
    path = options.settings(config, {"state_dir": state_dir}).server.token_file
    if path is None or target.token is None or not Path(path).is_file():
        return None
    return Path(path) if Path(path).read_text(encoding="utf-8").strip() == target.token else None


def _before(wanted: ClientConfig) -> str:
    try:
        return wanted.path.read_text(encoding="utf-8") if wanted.path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        options.fail(f"cannot read {wanted.path}: {getattr(error, 'strerror', None) or error}")


def _text(wanted: ClientConfig, before: str) -> str:
    from agentserve.cli.client_configs import Unmergeable

    try:
        return wanted.merged(before)
    except Unmergeable as error:
        options.fail(f"{wanted.path}: {error}; it is left as it is")


def _write(wanted: ClientConfig) -> None:
    before = _before(wanted)
    text = _text(wanted, before)
    if text == before:
        typer.echo(f"{wanted.path} has it already")
        return
    path = wanted.path.resolve()  # a link stays one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if before:
            shutil.copy2(path, path.with_name(path.name + ".before-agentserve"))
        fresh = path.with_name(path.name + ".new")
        fresh.touch(mode=0o600)
        fresh.write_text(text, encoding="utf-8")
        if before:
            shutil.copymode(path, fresh)
        fresh.replace(path)
    except OSError as error:
        options.fail(f"cannot write {wanted.path}: {error.strerror}")
    typer.echo(f"wrote {wanted.path}" + (f"; as it was: {path.name}.before-agentserve" if before else ""))


def _say_how(wanted: ClientConfig, kept: Path | None) -> None:
    from agentserve.cli.client_configs import TOKEN_VARIABLE

    typer.secho("\nThen start it:", err=True)
    if wanted.program != "claude":
        typer.secho(f"  export {TOKEN_VARIABLE}={f'$(cat {kept})' if kept is not None else '…'}", err=True)
    elif kept is None:
        typer.secho("  export ANTHROPIC_API_KEY=…", err=True)
    typer.secho(f"  {wanted.program} {' '.join(wanted.arguments)}", err=True)


def _run(wanted: ClientConfig, target: Target, arguments: list[str]) -> Any:
    program = shutil.which(wanted.program)
    if program is None:
        options.fail(f"'{wanted.program}' is not on the PATH; install it as its makers say, this command installs nothing")
    environ = {**os.environ, **wanted.environ(target.token or "none")}
    os.execve(program, [program, *wanted.inline, *arguments], environ)
