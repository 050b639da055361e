"""`agentserve cache` beside a running server: what reads works, what changes files says why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import PrivateServer
from tests.e2e.conftest import FLAGS
from tests.e2e.test_restart import cached
from tests.e2e.test_survival import body, counter, last, wait_until

pytestmark = pytest.mark.slow
Cache = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def served(own_server: PrivateServer) -> PrivateServer:
    """With two turns whose states are on disk."""
    with AgentSocket(own_server.target) as agent:
        first = last(list(agent.turn(body("the lamp by the river is green " * 60, temperature=0))))
        last(list(agent.turn(body("go on", first["id"], temperature=0))))
    wait_until(lambda: counter(own_server.target, 'agentserve_worker_counter{name="write_back_waiting",') == 0)
    return own_server


@pytest.fixture
def cache(own_server: PrivateServer) -> Cache:
    def run(*arguments: str, state_dir: Path = own_server.state_dir) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "agentserve.cli.main", "cache", *arguments, "--state-dir", str(state_dir)]
        environment = os.environ | {"COLUMNS": "120", "NO_COLOR": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert "Traceback" not in done.stderr, done.stderr
        return done

    return run


def files(state_dir: Path) -> list[Path]:
    return sorted(state_dir.glob("checkpoints/*/??/*.safetensors"))


def rows(output: str) -> dict[str, list[str]]:
    """Cells of a table by the first one."""
    found = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
    return {cells[0]: cells[1:] for cells in found if len(cells) > 2}


def test_what_reads_works_beside_a_running_server(served: PrivateServer, cache: Cache) -> None:
    url = served.target.url
    listed = cache("ls", "--url", url)
    assert listed.returncode == 0, listed.stderr
    name, states, extents, size, started = (rows(listed.stdout)["demo"])[:5]
    assert re.fullmatch("[0-9a-f]{8}", name)
    assert (int(states) + int(extents), size.split()[1], started.split()[-1]) == (len(files(served.state_dir)), "MiB", "ago")
    assert f"demo is served at {url}:" in listed.stdout
    assert {"device", "ram", "disk"} <= rows(listed.stdout).keys()
    nobody = cache("ls", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "no server at http://127.0.0.1:9" in nobody.stderr
    shown = cache("show", "demo", "--limit", "1")
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"… and {int(states) - 1} more, which --limit {states} would show", shown.stdout)
    assert re.search(rf"{states} checkpoints \(.*\) on \d+ tokens of KV in {extents} extents?", shown.stdout)
    unknown = cache("show", "other")
    assert unknown.returncode == 1
    assert f"no namespace fits 'other'; there are: {name} (demo)" in unknown.stderr
    checked = cache("verify")
    assert (checked.returncode, checked.stdout) == (0, f"demo: 0 of {len(files(served.state_dir))} segments are bad\n")


def test_the_quota_of_a_running_server_is_shown_and_changed_and_turns_go_on(served: PrivateServer, cache: Cache) -> None:
    url = served.target.url
    shown = rows(cache("quota", "--url", url).stdout)
    assert shown["ram"][2] == "256 MiB"
    changed = cache("quota", "--ram-mb", "100", "--disk-mb", "0", "--url", url)
    assert changed.returncode == 0, changed.stderr
    assert (rows(changed.stdout)["ram"][2], rows(changed.stdout)["disk"][2]) == ("100 MiB", "0 B")
    assert "the next one starts with 256 MiB of memory" in changed.stdout
    wait_until(lambda: not files(served.state_dir))
    with AgentSocket(served.target) as agent:
        again = last(list(agent.turn(body("the lamp by the river is green " * 60, temperature=0))))
    assert cached(again) > 300, "memory has it still"
    assert cache("quota", "--disk-mb", "64", "--url", url).returncode == 0
    with AgentSocket(served.target) as agent:
        last(list(agent.turn(body("the lamp is red now " * 60, temperature=0))))
    wait_until(lambda: bool(files(served.state_dir)))
    assert "Traceback" not in served.tail(1000)
    refused = cache("quota", "--disk-mb", "-1", "--url", url)
    assert refused.returncode == 2
    assert "--disk-mb" in refused.stderr
    nobody = cache("quota", "--url", "http://127.0.0.1:9")
    assert nobody.returncode == 1
    assert "Is it running? Start one with: agentserve serve" in nobody.stderr


def test_what_changes_files_waits_for_the_server_to_end(served: PrivateServer, cache: Cache, tmp_path: Path) -> None:
    tar = tmp_path / "states.tar"
    exported = cache("export", "demo", str(tar))
    assert exported.returncode == 0, exported.stderr
    assert re.fullmatch(rf"{len(files(served.state_dir))} segments, [\d.]+ MiB: {re.escape(str(tar))}\n", exported.stdout)
    before = files(served.state_dir)
    for command in (("gc",), ("rebuild",), ("import", str(tar))):
        busy = cache(*command)
        assert busy.returncode == 1, command
        assert "used by another process: a server that runs" in busy.stderr
    assert files(served.state_dir) == before
    lost = cache("export", "demo", str(tmp_path / "nowhere" / "states.tar"))
    assert lost.returncode == 1
    assert "No such file or directory" in lost.stderr
    assert served.stop() == 0

    freed = cache("gc")
    assert freed.returncode == 0, freed.stderr
    assert re.fullmatch(r"demo: [\d.]+ \w+ freed\n", freed.stdout)
    built = cache("rebuild")
    assert (built.returncode, built.stdout) == (0, f"demo: {len(files(served.state_dir))} rows\n")
    victim = files(served.state_dir)[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    found = cache("verify", "--quarantine")
    assert found.returncode == 1
    assert f"bad: {victim.parent.name}/{victim.name}: file has" in found.stdout
    assert not victim.exists()

    other = PrivateServer(tmp_path / "other", flags=FLAGS)
    assert cache("ls", state_dir=other.state_dir).returncode == 2, "it is not there yet"
    other.state_dir.mkdir()
    assert cache("ls", state_dir=other.state_dir).stdout == f"no saved states in {other.state_dir / 'checkpoints'}\n"
    assert "no saved states" in cache("verify", state_dir=other.state_dir).stdout
    damaged = cache("import", str(victim.parents[1] / "about.json"), state_dir=other.state_dir)
    assert damaged.returncode == 1
    assert "is not an export of saved states" in damaged.stderr
    missing = cache("import", str(tmp_path / "gone.tar"), state_dir=other.state_dir)
    assert missing.stderr.strip() == f"agentserve: {tmp_path / 'gone.tar'}: No such file or directory"
    brought = cache("import", str(tar), state_dir=other.state_dir)
    assert brought.returncode == 0, brought.stderr
    assert f"demo: {len(before)} segments added, 0 refused" in brought.stdout
    try:
        other.start()
        with AgentSocket(other.target) as agent:
            response = last(list(agent.turn(body("the lamp by the river is green " * 60, temperature=0))))
        assert cached(response) > 300, "the next start of that model found them"
    finally:
        other.stop()
