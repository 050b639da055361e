"""`agentserve serve`: run the server until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from agentserve.cli import options

if TYPE_CHECKING:
    from agentserve.app import Application
    from agentserve.worker.messages import Loading


def serve(
    config: options.ConfigFile = None,
    model: options.Model = None,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model. Default: the directory's name.")] = None,
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
        list[str] | None, typer.Option(help="Name accepted in the Host header beside loopback ones; may be repeated.")
    ] = None,
    allowed_origin: Annotated[
        list[str] | None, typer.Option(help="Origin that browsers may connect from; may be repeated. Default: none.")
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Ask for no token. Loopback only.")] = False,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
) -> None:
    """Serve a model on http://HOST:PORT/v1 and ws://HOST:PORT/v1/responses.

    The token is generated at the first start, printed once and kept in the state directory. Ctrl-C lets running turns finish; a
    second Ctrl-C does not. Sessions survive a restart.
    """
    flags = {
        "model.dir": model,
        "model.name": model_name,
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
    from agentserve import logs
    from agentserve.app import compose
    from agentserve.errors import ConfigError

    logs.setup(chosen.log.level)
    try:
        application = compose(chosen)
    except ConfigError as error:
        options.fail(str(error), status=2)
    # uvloop where it is installed: a token event costs about half of what it does on asyncio's own loop.
    with asyncio.Runner(loop_factory=application.server.config.get_loop_factory()) as runner:
        try:
            status = runner.run(_run(application))
        except ConfigError as error:
            options.fail(str(error), status=2)
    raise typer.Exit(status)


async def _run(application: Application) -> int:
    progress = LoadProgress()
    application.worker.on_loading = progress.loading
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
    print(f"agentserve: {config.model.name} on http://{shown}:{port}/v1 (ws://{shown}:{port}/v1/responses)", flush=True)
    if application.fresh_token is not None:
        print(f"agentserve: token (shown once, kept in {config.server.token_file}): {application.fresh_token}", flush=True)
    elif config.server.auth == "token" and config.server.token is None:
        print(f"agentserve: token is in {config.server.token_file}", flush=True)


async def _tell_ready(application: Application, progress: LoadProgress) -> None:
    ready = await application.worker.wait_ready()
    progress.close()
    if ready:
        print(f"agentserve: ready ({application.worker.hello.backend})" if application.worker.hello else "", flush=True)
    else:
        typer.secho(f"agentserve: the model cannot be served: {application.worker.failure}", err=True, fg="red")
        typer.secho("agentserve: the server keeps answering; /readyz says why. Stop it with Ctrl-C.", err=True)


class LoadProgress:
    """Shows how far a model is loaded: a bar on a terminal, else a line for each tenth."""

    def __init__(self) -> None:
        self._bar = None
        self._task = None
        self._tenths = -1
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def loading(self, frame: Loading) -> None:
        if self._bar is None:
            tenths = int(frame.fraction * 10)
            if tenths != self._tenths and frame.fraction < 1.0:  # that it is ready is said anyway
                self._tenths = tenths
                print(f"agentserve: loading {frame.fraction:.0%} ({frame.what})", file=sys.stderr, flush=True)
            return
        if self._task is None:
            self._bar.start()
            self._task = self._bar.add_task(frame.what, total=1.0)
        self._bar.update(self._task, completed=frame.fraction, description=frame.what)
        if frame.fraction >= 1.0:
            self.close()

    def close(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.stop()
            self._task = None
