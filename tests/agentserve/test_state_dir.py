"""A state directory has one server: real processes that start on the same one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentserve.errors import ConfigError
from agentserve.state_dir import LOCK, StateDir

HOLD = """
import sys, time
from pathlib import Path
from agentserve.state_dir import StateDir
held = StateDir.claim(Path(sys.argv[1]), "http://127.0.0.1:0")
held.say("http://127.0.0.1:4711")
print("held", flush=True)
sys.stdin.read()
"""


def holder(state: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str], how: int = signal.SIGTERM) -> None:
    process.send_signal(how)
    process.wait(60)
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def serve(state: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentserve.cli.main", "serve", "--port", "0", "--state-dir", str(state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_second_server_is_refused_before_it_touches_anything(tmp_path: Path) -> None:
    first = holder(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    try:
        second = serve(tmp_path)
        after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    finally:
        end(first)
    assert second.returncode == 2
    assert (
        f"the state directory {tmp_path} is used by another server: process {first.pid} on http://127.0.0.1:4711"
        in " ".join(second.stderr.split())
    )
    assert after == before


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_lock_of_a_dead_server_is_no_obstacle(tmp_path: Path, how: signal.Signals) -> None:
    end(holder(tmp_path), how)
    assert str(os.getpid()) not in (tmp_path / LOCK).read_text()
    StateDir.claim(tmp_path, "http://127.0.0.1:1").release()


def test_a_server_keeps_its_name_from_start_to_start(tmp_path: Path) -> None:
    first = StateDir.claim(tmp_path / "a", "http://127.0.0.1:1")
    first.release()
    again = StateDir.claim(tmp_path / "a", "http://[::1]:65535")
    other = StateDir.claim(tmp_path / "b", "http://127.0.0.1:1")
    assert again.server == first.server != other.server
    again.release()
    other.release()


def test_what_is_written_in_the_lock_does_not_matter(tmp_path: Path) -> None:
    for text in (b"", b"\n\n", os.urandom(5000)):
        (tmp_path / LOCK).write_bytes(text)
        held = StateDir.claim(tmp_path, "http://127.0.0.1:1")
        with pytest.raises(ConfigError, match=f"process {os.getpid()} on http://127.0.0.1:1;"):
            StateDir.claim(tmp_path, "http://127.0.0.1:2")
        held.release()


def test_of_many_that_claim_at_once_one_gets_it(tmp_path: Path) -> None:
    """Also where the file is deleted and made anew while they do."""
    got: list[StateDir] = []
    start = threading.Barrier(9)

    def claim() -> None:
        start.wait()
        try:
            got.append(StateDir.claim(tmp_path, "http://127.0.0.1:1"))
        except ConfigError:
            return

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    (tmp_path / LOCK).unlink()
    StateDir.claim(tmp_path, "http://127.0.0.1:2").release()
    got[0].release()


def test_a_directory_that_takes_no_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=f"the state directory {tmp_path} cannot be used: {LOCK}: Is a directory"):
        StateDir.claim(tmp_path, "http://127.0.0.1:1")
