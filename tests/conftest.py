"""Which tests run where. A test that cannot run says why; under TESTS_NO_SKIP=1 an unexpected skip is a failure."""

from __future__ import annotations

import glob
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentserve.garbage import keep_loaded, put_off
from tests.budget import examples
from tests.order import spread

put_off()  # collections over what is imported and collected find nothing: a quarter of the time that it takes
# A machine with a GPU may have only what the engine needs: its tests run there without the server's packages.
pytest_plugins = ["tests.fakes.databases"] if importlib.util.find_spec("sqlalchemy") else []
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each of the processes side by side has one core. Read when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not glob.glob("/dev/nvidia[0-9]*"):
    # Triton reads it when a kernel is defined, so it must be there before anything imports triton.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("hypothesis"):
    import hypothesis

    # A property that says no number of its own. The parent is what hypothesis has chosen, which differs under CI.
    # No clock decides whether a test fails: on a busy machine any example may take long, and drawing it as well.
    hypothesis.settings.register_profile(
        "budget",
        hypothesis.settings(),
        max_examples=examples(40, 100),
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("budget")

TIME_IS_UP = "TESTS_SECONDS are over: left for `make test-full`"
EXPECTED_SKIPS = (
    "needs a CUDA device",
    "needs the recorded traces",
    "needs the instruction set",
    "mounting a small file system needs root",
    TIME_IS_UP,
)
"""Reasons that are fine everywhere: hardware, privileges, data that a checkout does not have, time where it was limited."""
_started = time.monotonic()


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Clients in tests speak to loopback without TLS. Each would first read all the certificates there are, for 20 ms."""
    if importlib.util.find_spec("certifi") is None:
        yield
        return
    import certifi

    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("tls") / "one.pem"
    file.write_text(certifi.contents().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def _patient_clients() -> None:
    """httpx gives up after 5 s where a test says nothing else; a busy machine may stop for longer within an answer."""
    if importlib.util.find_spec("httpx") is None:
        return
    from httpx._config import DEFAULT_TIMEOUT_CONFIG as limits

    limits.connect = limits.read = limits.write = limits.pool = 60.0


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that is run in this process sets up logging for it; the next test must not find that."""
    yield
    from agentserve.logs import OneLine

    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler.formatter, OneLine)]
    if ours:
        for handler in ours:
            root.removeHandler(handler)
        for name in ("", "agentserve", "engine", "statecache"):
            logging.getLogger(name).setLevel(logging.WARNING if name == "" else logging.NOTSET)


def _missing(marker: str) -> str | None:
    """Why tests of this marker cannot run here, None if they can."""
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "needs a CUDA device"
    if marker == "postgres":
        found = glob.glob("/usr/lib/postgresql/*/bin/initdb") or shutil.which("initdb")
        return None if found else "needs PostgreSQL server binaries (initdb)"
    if marker == "clients":
        wanted = ("anthropic", "openai", "agents", "mcp", "langgraph", "langchain_openai")
        absent = [m for m in wanted if importlib.util.find_spec(m) is None]
        return f"needs client packages: {', '.join(absent)}" if absent else None
    return None


@pytest.hookimpl(trylast=True)  # when it is known which are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
        tests = Path(__file__).parent
        processes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        items[:] = spread(items, processes, lambda item: item.path.relative_to(tests).parts[0])
    markers = ("gpu", "postgres", "clients")
    reasons = {m: _missing(m) for m in markers if any(i.get_closest_marker(m) for i in items)}
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    keep_loaded()


def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = os.environ.get("TESTS_SECONDS")
    if limit and time.monotonic() - _started > float(limit):
        pytest.skip(TIME_IS_UP)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("TESTS_NO_SKIP") != "1" or exitstatus != 0 or reporter is None:
        return
    unexpected = []
    for report in reporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            unexpected.append(f"{report.nodeid}: {reason}")
    if unexpected:
        reporter.write_line("skipped though everything should run here:", red=True)
        for line in unexpected:
            reporter.write_line("  " + line, red=True)
        session.exitstatus = 1
