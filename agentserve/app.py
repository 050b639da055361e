"""Composition root of the server process: the only file that names concrete classes. Starts and stops what they need."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentserve.config import Config, unknown_names
from agentserve.errors import ConfigError
from agentserve.metrics import Metrics
from agentserve.security import load_tokens
from agentserve.server import DrainingServer, create_app, uvicorn_config
from agentserve.session.database import connect, upgrade
from agentserve.session.store import SqlStore
from agentserve.text.errors import TextError
from agentserve.text.model_text import ModelText
from agentserve.turn import Services
from agentserve.worker.client import WorkerClient
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.supervisor import Supervisor

log = logging.getLogger(__name__)
RENDER_THREADS = 2
"""Rendering holds the GIL for much of its time; more threads would only queue there."""


@dataclass(frozen=True, slots=True)
class Application:
    """One server, ready to be run by `server.serve()`. fresh_token: the token if it was generated just now."""

    config: Config
    worker: WorkerClient
    supervisor: Supervisor
    server: DrainingServer
    fresh_token: str | None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the started server listens on."""
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return host, port


def compose(config: Config) -> Application:
    """Everything of one server, wired up. Starts nothing but reads the tokenizer. Raises ConfigError."""
    for name in unknown_names():
        log.warning("environment variable sets nothing name=%s", name)
    Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    tokens, fresh_token = load_tokens(config.server)
    metrics = Metrics()
    worker = WorkerClient()
    worker.on_load = metrics.load
    supervisor = Supervisor(worker, worker_settings(config))
    metrics.watch_worker(lambda: worker.ready, lambda: supervisor.restarts)
    threads = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="render")
    store = SqlStore(config.store)
    services = Services(config, load_text(config, store), store, worker, threads, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        await store.open()
        supervisor.start()
        try:
            yield
        finally:
            await supervisor.stop(drain_s=5.0)
            threads.shutdown(wait=False, cancel_futures=True)
            await store.close()

    app, api = create_app(services, tokens, lifespan)
    server = DrainingServer(uvicorn_config(app, services), api)
    return Application(config, worker, supervisor, server, fresh_token)


def load_text(config: Config, store: SqlStore) -> ModelText:
    """Tokenizer, template and dialect of the served model. Raises ConfigError with what is wrong in its directory."""
    dialect = None if config.model.dialect == "auto" else config.model.dialect
    try:
        return ModelText.load(Path(config.model.dir), dialect=dialect, book=store.aliases)
    except (TextError, OSError, ValueError) as error:
        raise ConfigError(f"model {config.model.dir}: {error}") from error


def migrate(config: Config) -> str:
    """Bring the sessions database to the newest schema. Returns its revision. Raises sqlalchemy.exc.SQLAlchemyError."""
    Path(config.state_dir).mkdir(parents=True, exist_ok=True)
    engine = connect(config.store.url, config.store.password_file)
    try:
        return str(upgrade(engine))
    finally:
        engine.dispose()


def worker_settings(config: Config) -> WorkerSettings:
    """What the worker is told of the settings."""
    model = config.model
    return WorkerSettings(
        model_dir=model.dir,
        model_name=model.name,
        state_dir=config.state_dir,
        device=model.device,
        threads=model.threads,
        ram_cache_bytes=model.ram_cache_bytes,
        disk_cache_bytes=model.disk_cache_bytes,
        disk_reserve_bytes=model.disk_reserve_bytes,
        disk_bytes_per_hour=model.disk_bytes_per_hour,
        log_level=config.log.level,
        engine=model.engine,
    )
