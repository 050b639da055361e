"""The live table of routes, for tests that must not miss one."""

from __future__ import annotations

from starlette.routing import Route, WebSocketRoute

from tests.fakes.server import FakeServer, config_for_tests


def table() -> list[tuple[str, str]]:
    """The routes of the app as it is served."""
    server = FakeServer(config_for_tests())
    server.loop.close()
    server.threads.shutdown()
    found: list[tuple[str, str]] = []
    for route in server.server.config.app._app.routes:  # type: ignore[union-attr]
        assert isinstance(route, Route | WebSocketRoute), f"a route of another kind: {route}"
        if isinstance(route, Route):
            found += [(method, route.path) for method in sorted((route.methods or set()) - {"HEAD"})] or [("HEAD", route.path)]
        else:
            found.append(("WEBSOCKET", route.path))
    return found


ROUTES = [(method, path) for method, path in table() if method != "WEBSOCKET"]
