"""What conftest.py says of skipped tests, for one process and for several side by side, and of properties."""

from __future__ import annotations

import os
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
    pytest.skip({reason!r})

def test_other():
    pass
"""


@pytest.fixture(params=[(), ("-n", "2", "-p", "xdist.plugin")], ids=["alone", "side by side"])
def run(request: pytest.FixtureRequest, tmp_path: Path):
    """run(reason, **environment): pytest over a test that is skipped for this reason and one that passes."""

    def go(reason: str, **environment: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "test_skipped.py").write_text(SKIPPED.format(reason=reason))
        command = [sys.executable, "-m", "pytest", *request.param, "-c", os.devnull, f"--rootdir={tmp_path}", str(tmp_path)]
        told = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "TESTS_"))}
        told |= {"PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
        return subprocess.run(command, env=told, capture_output=True, text=True, timeout=120)

    return go


def test_a_skip_fails_the_run_where_everything_should_run(run) -> None:
    assert run("needs a unicorn").returncode == 0
    strict = run("needs a unicorn", TESTS_NO_SKIP="1")
    assert strict.returncode == 1
    assert "test_one: Skipped: needs a unicorn" in strict.stdout


def test_a_skip_for_want_of_hardware_or_time_fails_nothing(run) -> None:
    early = run("needs a CUDA device", TESTS_NO_SKIP="1", TESTS_SECONDS="1000")
    assert (early.returncode, "1 passed, 1 skipped" in early.stdout) == (0, True)
    late = run("needs a unicorn", TESTS_NO_SKIP="1", TESTS_SECONDS="0")
    assert (late.returncode, "2 skipped" in late.stdout) == (0, True)


def test_no_clock_decides_whether_a_property_holds() -> None:
    assert hypothesis.settings.default is not None
    assert hypothesis.settings.default.deadline is None
    assert hypothesis.HealthCheck.too_slow in hypothesis.settings.default.suppress_health_check
