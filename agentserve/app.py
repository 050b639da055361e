"""Composition root of the server process: the only file that names concrete classes. Starts and stops what they need."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

import statecache.index.connect
from agentserve.config import Config, ModelConfig, unknown_names
from agentserve.dialects.registry import DIALECTS
from agentserve.errors import ConfigError
from agentserve.garbage import keep_loaded
from agentserve.large import switch_often
from agentserve.listen import listen
from agentserve.metrics import Metrics
from agentserve.sealing import Seal
from agentserve.security import load_tokens
from agentserve.served import Served
from agentserve.server import DrainingServer, create_app, uvicorn_config
from agentserve.services import Services
from agentserve.session.database import connect, upgrade
from agentserve.session.store import SqlStore
from agentserve.state_dir import StateDir, make_state_dir
from agentserve.text.errors import TextError
from agentserve.text.messages import PARSED
from agentserve.text.model_text import ModelText
from agentserve.text.planner import CLAIMS
from agentserve.worker.client import WorkerClient
from agentserve.worker.fleet import Fleet
from agentserve.worker.settings import WorkerSettings
from agentserve.worker.shares import Share, shares
from agentserve.worker.supervisor import STUCK_S, Spawn, Supervisor, spawn_worker
from statecache.directory import label_of

log = logging.getLogger(__name__)
RENDER_THREADS = 2
"""Rendering holds the GIL for much of its time; more threads would only queue there."""


@dataclass(frozen=True, slots=True)
class Application:
    """One server, ready to be run by `serve()`. fresh_token: the token if it was generated just now.

    state: of this server alone until it has served. fleets: the workers of each model, in the order of `config.served`.
    """

    config: Config
    state: StateDir
    fleets: tuple[Fleet, ...]
    server: DrainingServer
    store: SqlStore
    fresh_token: str | None

    async def serve(self) -> None:
        """Run until told to stop. Raises ConfigError if the address or the database cannot be used; nothing is started then."""
        host = self.config.server.host
        with contextlib.ExitStack() as used:
            used.callback(self.state.release)
            sockets = listen(host, self.config.server.port)
            for one in sockets:
                used.callback(one.close)
            with contextlib.suppress(OSError):  # a full disk: others hear the address of the settings
                self.state.say(address(host, sockets[0].getsockname()[1]))
            await open_store(self.store, self.config)
            await self.server.serve(sockets)

    def runner(self) -> asyncio.Runner:
        """The event loop to serve in: uvloop where it is installed, a token event costs about half of asyncio's own there."""
        return asyncio.Runner(loop_factory=self.server.config.get_loop_factory())

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that the started server listens on."""
        host, port = self.server.servers[0].sockets[0].getsockname()[:2]
        return host, port


def compose(config: Config, spawn: Spawn = spawn_worker, *, stuck_s: float = STUCK_S) -> Application:
    """Everything of one server, wired up. Starts nothing, but claims the state directory and reads the tokenizer.

    spawn: starts worker processes. stuck_s: see Supervisor. Raises ConfigError.
    """
    for name in unknown_names():
        log.warning("environment variable sets nothing name=%s", name)
    state = StateDir.claim(Path(config.state_dir), address(config.server.host, config.server.port))
    try:
        return _compose(config, state, spawn, stuck_s)
    except BaseException:
        state.release()
        raise


def _compose(config: Config, state: StateDir, spawn: Spawn, stuck_s: float) -> Application:
    tokens, fresh_token = load_tokens(config.server)
    metrics = Metrics()
    workers = [
        (share, Supervisor(WorkerClient(), worker_settings(config, share), spawn=spawn, stuck_s=stuck_s))
        for share in shares(config.served)
    ]
    for share, supervisor in workers:
        metrics.watch_worker(share.label, supervisor)
    fleets = tuple(
        Fleet([supervisor.client for share, supervisor in workers if share.model is model]) for model in config.served
    )
    for model, fleet in zip(config.served, fleets, strict=True):
        metrics.watch_fleet(model.name, fleet)
    threads = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="render")
    store = make_store(config, state.server)
    seal = Seal.load(state.path / "seal.key")
    texts = [load_text(model, store) for model in config.served]
    models = tuple(Served(model.name, text, fleet) for model, text, fleet in zip(config.served, texts, fleets, strict=True))
    services = Services(config, models, store, threads, metrics, seal=seal)
    caches = {**store.caches, "unstored": services.unstored, "endings": services.endings, "rules": services.rules}
    caches |= {"arguments": PARSED, "claims": CLAIMS}
    for what, cache in caches.items():
        metrics.watch_kept(what, lambda cache=cache: cache.size_bytes)
    for what in texts[0].caches:
        metrics.watch_kept(what, lambda what=what: sum(text.caches[what].size_bytes for text in texts))
    metrics.watch_kept("encoded", lambda: sum(text.tokenizer.kept_bytes for text in texts))
    metrics.watch_kept("compared", lambda: sum(model.contexts.size_bytes for model in models))

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        for _share, supervisor in workers:
            supervisor.start()
        keep_loaded()
        switch_often()
        try:
            yield
        finally:
            await asyncio.gather(*(supervisor.stop(drain_s=5.0) for _share, supervisor in workers))
            for pool in (threads, services.reader):
                pool.shutdown(wait=False, cancel_futures=True)
            await store.close()

    app, api = create_app(services, tokens, lifespan)
    server = DrainingServer(uvicorn_config(app, services), api)
    return Application(config, state, fleets, server, store, fresh_token)


def address(host: str, port: int) -> str:
    """Where clients find a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def make_store(config: Config, server: str) -> SqlStore:
    """server: its name among those that share the database. Opens no connection.

    Raises ConfigError if the URL means no database that this server can use.
    """
    try:
        return SqlStore(config.store, server)
    except (ArgumentError, ImportError, OSError, ValueError) as error:
        raise ConfigError(f"store.url cannot be used: {error}") from error


async def open_store(store: SqlStore, config: Config) -> None:
    """Connect and bring the schema up to date. Raises ConfigError with the database's own reason."""
    try:
        await store.open()
    except (SQLAlchemyError, OSError) as error:
        await store.close()
        reason = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
        where = make_url(config.store.url).render_as_string(hide_password=True)
        why = "; ".join(filter(None, (" ".join(str(reason).split()), store.advice(error))))
        raise ConfigError(f"the sessions database {where} cannot be used: {why}") from error


def load_text(model: ModelConfig, store: SqlStore) -> ModelText:
    """Tokenizer, template and dialect of a served model. Raises ConfigError with what is wrong in its directory."""
    dialect = None if model.dialect == "auto" else model.dialect
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"model.dialect: got '{dialect}'; accepted: auto, {', '.join(DIALECTS)}")
    try:
        return ModelText.load(Path(model.dir), dialect=dialect, book=store.aliases)
    except (TextError, OSError, ValueError) as error:
        raise ConfigError(f"model {model.dir}: {error}") from error
    except (AttributeError, LookupError, TypeError) as error:
        what = "tokenizer_config.json or the chat template is not shaped as such files are"
        raise ConfigError(f"model {model.dir}: {what} ({type(error).__name__}: {error})") from error


def migrate(config: Config) -> str:
    """Bring both databases to the newest schema. Returns their revisions. Raises sqlalchemy.exc.SQLAlchemyError."""
    make_state_dir(Path(config.state_dir))
    engine = connect(config.store.url, config.store.password_file)
    index = statecache.index.connect.connect(config.model.checkpoints_url)
    try:
        return f"{upgrade(engine)}, {upgrade(index, 'statecache')}"
    finally:
        engine.dispose()
        index.dispose()


def worker_settings(config: Config, share: Share) -> WorkerSettings:
    """What a worker is told of the settings."""
    model = share.model
    everybody = tuple(label_of(one.model.name, one.number) for one in shares(config.served))
    return WorkerSettings(
        model_dir=model.dir,
        model_name=model.name,
        state_dir=config.state_dir,
        device=model.device,
        threads=model.threads,
        ram_cache_bytes=share.ram_cache_bytes,
        disk_cache_bytes=model.disk_cache_bytes,
        disk_reserve_bytes=model.disk_reserve_bytes,
        disk_bytes_per_hour=model.disk_bytes_per_hour,
        device_residency=model.device_residency,
        checkpoints_url=model.checkpoints_url,
        log_level=config.log.level,
        worker=share.number,
        gpu=share.gpu,
        beside=everybody if len(everybody) > 1 else (),
        gpu_sharers=share.gpu_sharers,
        engine={**({"vram_bytes": model.vram_bytes} if model.vram_bytes else {}), **model.engine},
    )
