"""What conftest.py says of skipped tests, for one process and for several side by side, and of properties."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).parents[1]
CONFTEST = "from tests.conftest import pytest_runtest_setup, pytest_sessionfinish\n"
SKIPPED = """
import pytest

def test_one():
    pytest.skip("needs a unicorn")

def test_other():
    pytest.skip("needs a CUDA device")

def test_third():
    pass
"""


@pytest.fixture(params=[(), ("-n", "1", "-p", "xdist.plugin")], ids=["alone", "in a process beside it"])
def run(request: pytest.FixtureRequest, tmp_path: Path):
    """run(*names, **environment): pytest over these tests of SKIPPED, in this process's stead or in another of its own."""

    def go(*names: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_skipped.py").write_text(SKIPPED)
        command = [sys.executable, "-m", "pytest", *request.param, "-c", os.devnull, f"--rootdir={tmp_path}"]
        command += [f"{tmp_path}/test_skipped.py::{name}" for name in names]
        told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TESTS_"))}
        told |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        return subprocess.run(command, env=told, capture_output=True, text=True, timeout=120)

    return go


def test_a_skip_fails_the_run_where_everything_should_run(run) -> None:
    strict = run("test_one", "test_other", "test_third", TESTS_NO_SKIP="1")
    assert strict.returncode == 1
    assert "test_one: Skipped: needs a unicorn" in strict.stdout
    assert "test_other: " not in strict.stdout


def test_a_skip_for_want_of_hardware_fails_nothing(run) -> None:
    early = run("test_other", "test_third", TESTS_NO_SKIP="1", TESTS_SECONDS="1000")
    assert (early.returncode, "1 passed, 1 skipped" in early.stdout) == (0, True)


@pytest.mark.parametrize("run", [()], indirect=True, ids=["alone"])
def test_a_skip_for_want_of_time_fails_nothing_nor_does_any_where_some_may_be_skipped(run) -> None:
    late = run("test_one", "test_third", TESTS_NO_SKIP="1", TESTS_SECONDS="0")
    assert (late.returncode, "2 skipped" in late.stdout) == (0, True)
    assert run("test_one").returncode == 0


WAITS = re.compile(
    r"\b(?:timeout(?:_s)?|start_wait_s|query_wait_s|ready_s|limit_s)(?:: float)? ?= ?(?P<named>\d+(?:\.\d+)?)\b"
    r"|(?:\.wait|\.join|\.result|settimeout|asyncio\.timeout|wait_ready)\((?P<only>\d+(?:\.\d+)?)\)"
    r"|\bwait_(?:for|until)\(.*, (?P<last>\d+(?:\.\d+)?)\)"
)


def test_no_test_gives_up_within_less_than_a_minute_on_what_must_come() -> None:
    """Where a machine is busy any line may take seconds. A test of a limit sets it to 0 or moves a clock."""
    short = [
        f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for file in (REPOSITORY / "tests").rglob("*.py")
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if (found := WAITS.search(line)) and 0 < float(found["named"] or found["only"] or found["last"]) < 60
    ]
    assert short == []


def test_no_clock_decides_whether_a_property_holds() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings.default.suppress_health_check
