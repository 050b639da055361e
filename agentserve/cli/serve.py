"""`agentserve serve`: run the server until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from agentserve.cli import options

if TYPE_CHECKING:
    from agentserve.app import Application
    from agentserve.worker.messages import Loading


def serve(
    config: options.ConfigFile = None,
    model: Annotated[
        list[Path] | None,
        typer.Option(
            "--model",
            "-m",
            parser=options.path,
            help="Hugging Face checkpoint directory; may be repeated to serve several. Default: the embedded demo model.",
            metavar="DIR",
        ),
    ] = None,
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="What clients call the model; once for each --model. Default: the directory's name.", metavar="NAME"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes that serve each model side by side. Default: 1, or one for each --gpu.")
    ] = None,
    gpu: Annotated[
        list[int] | None,
        typer.Option(help="Index of a GPU for a worker; may be repeated. Default: the first one.", metavar="N"),
    ] = None,
    host: options.Host = None,
    port: options.Port = None,
    state_dir: options.StateDir = None,
    database_url: options.DatabaseUrl = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the model, 0 = all cores.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    vram: Annotated[
        float | None, typer.Option(help="Device memory that the model may take, in GB. Default: what is free.", metavar="GB")
    ] = None,
    cache_mb: Annotated[
        int | None, typer.Option("--cache-mb", help="Memory for saved states, in MiB. Default: an eighth of it all.")
    ] = None,
    disk_cache_mb: Annotated[
        int | None,
        typer.Option("--disk-cache-mb", help="Disk space for saved states, in MiB, 0 for none. Default: 8192."),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="Name accepted in the Host header beside loopback ones; may be repeated.", metavar="NAME"),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin that browsers may connect from; may be repeated. Default: none.", metavar="ORIGIN"),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token. Loopback only.")] = False,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Serve a model on http://HOST:PORT/v1 and ws://HOST:PORT/v1/responses.

    The token is generated at the first start, printed once and kept in the state directory. Ctrl-C lets running turns finish; a
    second Ctrl-C does not. Sessions survive a restart.
    """
    flags = {
        **_models(model, model_name),
        "model.workers": workers,
        "model.gpus": gpu or None,
        "server.host": host,
        "server.port": port,
        "state_dir": state_dir,
        "store.url": database_url,
        "model.threads": threads,
        "model.device": device,
        "model.vram_bytes": None if vram is None else round(vram * 1e9),
        "model.ram_cache_bytes": None if cache_mb is None else cache_mb << 20,
        "model.disk_cache_bytes": None if disk_cache_mb is None else disk_cache_mb << 20,
        "server.allowed_hosts": allowed_host or None,
        "server.allowed_origins": allowed_origin or None,
        "server.auth": "none" if no_auth else None,
        "log.level": log_level,
    }
    chosen = options.settings(config, flags)
    from agentserve import garbage, logs

    garbage.put_off()  # what is imported now is most of a start
    from agentserve.app import compose
    from agentserve.errors import ConfigError

    logs.setup(chosen.log.level)
    try:
        application = compose(chosen)
    except ConfigError as error:
        options.fail(str(error), status=2)
    with application.runner() as runner:
        try:
            status = runner.run(_run(application))
        except ConfigError as error:
            options.fail(str(error), status=2)
    raise typer.Exit(status)


def _models(directories: list[Path] | None, names: list[str] | None) -> Mapping[str, object]:
    """Settings of the models that flags name; instead of those in a file."""
    dirs = [str(path) for path in directories or ()]
    if len(dirs) <= 1 and len(names or ()) <= 1:
        return {"model.dir": dirs[0] if dirs else None, "model.name": names[0] if names else None} | (
            {"models": []} if dirs else {}
        )
    if names and len(names) != len(dirs):
        options.fail(
            f"--model-name: got {len(names)} for {len(dirs)} models; accepted: one for each --model, or none", status=2
        )
    return {"models": [{"dir": path} | ({"name": names[number]} if names else {}) for number, path in enumerate(dirs)]}


async def _run(application: Application) -> int:
    progress = LoadProgress()
    for fleet in application.fleets:
        for client in fleet.clients:
            client.on_loading = progress.loading
    server = application.server
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn takes both over, drains, and raises them again for whoever had them before: this ends the process with 0.
        signal.signal(number, lambda _number, _frame: None)
    serving = asyncio.ensure_future(application.serve())
    while not server.started and not serving.done():  # noqa: ASYNC110  (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    if server.started:
        _banner(application)
        telling = asyncio.ensure_future(_tell_ready(application, progress))
        await asyncio.wait({serving, telling}, return_when=asyncio.FIRST_COMPLETED)
        await serving
        telling.cancel()
    try:
        await serving
    finally:
        progress.close()
    return 0 if server.started else 1


def _banner(application: Application) -> None:
    """The address and, the first time, the token: on standard output, so that it can be piped on."""
    config = application.config
    host, port = application.address
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(model.name for model in config.served)
    _say(f"{names} on http://{shown}:{port}/v1 (ws://{shown}:{port}/v1/responses)", sys.stdout)
    if application.fresh_token is not None:
        _say(f"token (shown once, kept in {config.server.token_file}): {application.fresh_token}", sys.stdout)
    elif config.server.auth == "token" and config.server.token is None:
        _say(f"token is in {config.server.token_file}", sys.stdout)


async def _tell_ready(application: Application, progress: LoadProgress) -> None:
    ready = await asyncio.gather(*(fleet.wait_ready() for fleet in application.fleets))
    progress.close()
    if all(ready):
        backends = dict.fromkeys(fleet.hello.backend for fleet in application.fleets if fleet.hello is not None)
        _say(f"ready ({', '.join(backends)})", sys.stdout)
        return
    for model, fleet in zip(application.config.served, application.fleets, strict=True):
        if fleet.failure is not None:
            which = "the model" if len(application.fleets) == 1 else f"the model {model.name}"
            typer.secho(f"agentserve: {which} cannot be served: {fleet.failure}", err=True, fg="red")
    typer.secho("agentserve: the server keeps answering; /readyz says why. Stop it with Ctrl-C.", err=True)


class LoadProgress:
    """Says how far models are loaded: a line for each part of the work and each tenth, until all are ready.

    No bar: the log, the workers' too, goes to the same terminal.
    """

    def __init__(self) -> None:
        self._said: tuple[str, int] | None = None
        self._over = False

    def loading(self, frame: Loading) -> None:
        now = (frame.what, int(frame.fraction * 10))
        if self._over or now == self._said or frame.fraction >= 1.0:  # that it is ready is said anyway
            return
        self._said = now
        _say(f"loading: {frame.what}" + (f", {frame.fraction:.0%}" if frame.fraction > 0 else ""), sys.stderr)

    def close(self) -> None:
        """A worker that is started anew later is in the log."""
        self._over = True


def _say(text: str, file: TextIO) -> None:
    """In one write, so that no line of the log comes between a line and its end, also where nothing is buffered."""
    file.write(f"agentserve: {text}\n")
    file.flush()
