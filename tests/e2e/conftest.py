"""Real server processes: `agentserve serve` on a free loopback port with its own state directory, waited for until ready.

`server` is shared by a whole run and must be left as it was found; `own_server` belongs to one test, which may kill it.
Both serve the embedded model with one thread. `rambling_model` is the same with random weights: it goes on until it is stopped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentserve.cli.private_server import PrivateServer, private_server
from tests.e2e.agents import World, settings
from tests.e2e.programs import npm_program

DEMO_MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"
FLAGS = ("--threads", "1", "--cache-mb", "256")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For the workers, which inherit the environment: several run at once on few cores."""
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateServer]:
    with private_server(tmp_path_factory.mktemp("server"), flags=FLAGS) as running:
        running.start()
        yield running


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server on the exact backend, where a restored state must give bitwise what a cold run gives."""
    directory = tmp_path_factory.mktemp("exact")
    (directory / "settings.toml").write_text(settings("exact"))
    flags = ("--config", str(directory / "settings.toml"), "--threads", "1", "--cache-mb", "2048")
    with private_server(directory / "state", flags=flags) as running:
        running.start()
        world = World(running, DEMO_MODEL)
        yield world
        world.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[PrivateServer]:
    with private_server(tmp_path / "state", flags=FLAGS) as running:
        running.start()
        yield running


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., PrivateServer]]:
    """start_server(*flags) → a server with these flags, started and ready; stopped when the test ends."""
    started: list[PrivateServer] = []

    def start(*flags: str) -> PrivateServer:
        server = PrivateServer(tmp_path / f"state{len(started)}", flags=(*FLAGS, *flags))
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def rambling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a model that practically never ends a turn by itself."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = tmp_path_factory.mktemp("rambling")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DEMO_MODEL)).to(torch.bfloat16)
    model.save_pretrained(directory)
    for file in DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.startswith("model.safetensors"):
            shutil.copy(file, directory / file.name)
    return directory


@pytest.fixture(scope="session")
def rambling(tmp_path_factory: pytest.TempPathFactory, rambling_model: Path) -> Iterator[PrivateServer]:
    """A server whose turns go on until they are stopped, and which writes no states. Its worker may be killed, itself not."""
    flags = (*FLAGS, "--model", str(rambling_model), "--disk-cache-mb", "0")
    with private_server(tmp_path_factory.mktemp("rambling-server"), flags=flags) as server:
        server.start()
        yield server


@pytest.fixture(scope="session")
def codex_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return npm_program("codex", "@openai/codex", tmp_path_factory.mktemp("codex"))


@pytest.fixture(scope="session")
def claude_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    return npm_program("claude", "@anthropic-ai/claude-code", tmp_path_factory.mktemp("claude"))
