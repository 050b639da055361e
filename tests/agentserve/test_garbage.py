"""Full garbage collections do not look at what was loaded, in neither process; what comes later is collected as ever."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from agentserve.large import SWITCH_S
from agentserve.worker import main as worker_main
from agentserve.worker.messages import Drain
from agentserve.worker.pipe import WorkerPipe, append_frame
from agentserve.worker.settings import WorkerSettings
from benchmarks.load.machines import MACHINES
from benchmarks.load.timed import VirtualClock, timed_engine

KEEPS = """
import gc, weakref
from agentserve.garbage import keep_loaded, put_off

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

put_off()
collected, first = gc.get_stats(), cycle()
before = [[number] for number in range(10_000)]
assert gc.get_stats() == collected
assert first() is not None
keep_loaded()
assert first() is None
assert not any(one is before for one in gc.get_objects())
later, gone = [[1]], cycle()
gc.collect()
assert any(one is later for one in gc.get_objects())
assert gone() is None
assert gc.isenabled()
"""

LOADS = """
import gc, runpy, sys
_, module, heavy, *arguments = sys.argv
sys.argv = [module, *arguments]
try:
    runpy.run_module(module, run_name="__main__")
except SystemExit:
    pass
assert heavy in sys.modules
print(gc.get_stats()[2]["collections"])
"""

SERVES = """
import asyncio, gc, sys
from agentserve.app import compose
from agentserve.config import load

async def spawn(settings, sock):
    # Ends when it is told anything, which is to drain.
    program = f"import socket; socket.socket(fileno={sock.fileno()}).recv(1)"
    return await asyncio.create_subprocess_exec(sys.executable, "-c", program, pass_fds=(sock.fileno(),))

flags = {"state_dir": sys.argv[1], "server.port": 0, "server.auth": "none"}
application = compose(load(flags=flags, environ={"HOME": sys.argv[1]}), spawn)

async def serve():
    serving = asyncio.ensure_future(application.serve())
    while not application.server.started and not serving.done():
        await asyncio.sleep(0.01)
    print(gc.get_freeze_count() > 10_000, type(asyncio.get_running_loop()).__module__, sys.getswitchinterval())
    application.server.should_exit = True
    await serving

with application.runner() as runner:
    runner.run(serve())
"""


def test_what_was_loaded_is_not_looked_at_again_and_later_cycles_are_collected() -> None:
    subprocess.run([sys.executable, "-c", KEEPS], check=True)


@pytest.mark.parametrize(
    ("module", "heavy", "arguments"),
    [
        ("agentserve.worker.main", "torch", ["--help"]),
        ("agentserve", "sqlalchemy", ["serve", "--model", "{empty}", "--state-dir", "{empty}"]),
    ],
    ids=["worker", "server"],
)
def test_no_full_collection_slows_a_start(module: str, heavy: str, arguments: list[str], tmp_path: Path) -> None:
    told = [argument.format(empty=tmp_path) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", LOADS, module, heavy, *told], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0"


@pytest.mark.skipif(sys.platform == "win32", reason="uvloop does not exist there")
def test_a_server_keeps_what_it_loaded_runs_on_uvloop_and_switches_threads_often(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SERVES, str(tmp_path)], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True", "uvloop", str(SWITCH_S)]


def test_a_worker_keeps_what_it_loaded_before_its_first_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr(worker_main, "keep_loaded", lambda: kept.append(1))
    monkeypatch.setattr(worker_main.signal, "signal", lambda *_: None)
    ours, theirs = socket.socketpair()
    woken, wake = socket.socketpair()
    settings = WorkerSettings(model_dir="", model_name="timed", state_dir=str(tmp_path), disk_cache_bytes=0)
    with ours, theirs, woken, wake:
        pipe = WorkerPipe(ours, woken)
        drain = bytearray()
        append_frame(drain, msgspec.msgpack.encode(Drain()))
        theirs.sendall(drain)
        engine = timed_engine(MACHINES["instant"], VirtualClock(), vocab_size=64, end=1, words=[2, 3], kv_tokens=4096)
        assert worker_main.serve(pipe, wake, settings, lambda *_: engine) == 0
    assert kept == [1]
