"""A real server process part (uvicorn, sockets) in a thread, over fake text, store and worker."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from agentserve.config import Config, load
from agentserve.security import Tokens
from agentserve.served import Served
from agentserve.server import DrainingServer, create_app, uvicorn_config
from agentserve.services import Services
from tests.fakes.store import FakeStore
from tests.fakes.text import FakeText
from tests.fakes.worker import FakeWorker

TOKEN = "test-token-1"
OTHER_TOKEN = "test-token-2"


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds; fails after `timeout_s`, which is generous, since it only matters for broken code."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.002)


def stream_until(reply: httpx.Response, mark: str, count: int, then: Callable[[], object]) -> str:
    """The whole text of a stream; then() is called when `mark` has come `count` times. No clock says how long that takes."""
    text, called = "", False
    for piece in reply.iter_text():
        text += piece
        if not called and text.count(mark) >= count:
            called = True
            then()
    return text


class FakeServer:
    """url: `http://127.0.0.1:port`. loop: the server's event loop, in its own thread."""

    def __init__(self, config: Config, store: Any = None) -> None:
        self.text, self.store, self.worker = FakeText(), store or FakeStore(), FakeWorker()
        self.threads = ThreadPoolExecutor(2)
        self.services = Services(config, (Served(config.model.name, self.text, self.worker),), self.store, self.threads)
        tokens = Tokens([("default", TOKEN), ("other", OTHER_TOKEN)]) if config.server.auth == "token" else None
        app, self.api = create_app(self.services, tokens)
        self.server = DrainingServer(uvicorn_config(app, self.services), self.api)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-server")
        self._started = threading.Event()
        self.port = 0
        self.error: BaseException | None = None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_until_complete(self._serve())
        except BaseException as exc:
            self.error = exc
        finally:
            self._started.set()
            self.loop.close()

    async def _serve(self) -> None:
        task = asyncio.ensure_future(self.server._serve())
        while not self.server.started and not task.done():
            await asyncio.sleep(0.005)
        if not task.done():
            self.port = self.server.servers[0].sockets[0].getsockname()[1]
            self._started.set()
        await task

    def start(self) -> None:
        self._thread.start()
        self._started.wait(60)
        if self.error is not None:
            raise self.error
        assert self.port

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.threads.shutdown()
        if self.error is not None:
            raise self.error

    def call(self, function: Any, *args: Any) -> None:
        """Run `function` on the server's loop."""
        self.loop.call_soon_threadsafe(function, *args)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/responses"


def config_for_tests(**sections: dict[str, Any]) -> Config:
    """Settings with port 0 and short times; sections override fields."""
    config = load(
        environ={"HOME": "/nonexistent"}, flags={"model.name": "fake", "model.dir": "/nonexistent/fake", "server.port": 0}
    )
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, drain_s=5.0))
    for name, fields in sections.items():
        config = msgspec.structs.replace(config, **{name: msgspec.structs.replace(getattr(config, name), **fields)})
    return config


@contextlib.contextmanager
def running(config: Config | None = None, store: Any = None) -> Iterator[FakeServer]:
    """store: another than the fake one, open already."""
    server = FakeServer(config or config_for_tests(), store)
    server.start()
    try:
        yield server
    finally:
        server.stop()
