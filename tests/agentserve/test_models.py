"""Several models in the settings and behind one server: names, what entries inherit, what is refused, who answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

from agentserve.cli.main import app as cli
from agentserve.config import Config, load
from agentserve.errors import ConfigError
from agentserve.served import Served
from agentserve.server import create_app
from agentserve.services import Services
from agentserve.text.aliases import Alias, OwnAliases
from tests.agentserve.text.play import MemoryBook
from tests.fakes.server import config_for_tests
from tests.fakes.store import FakeStore
from tests.fakes.text import FakeText
from tests.fakes.worker import HELLO, FakeWorker, answer


def settings(tmp_path: Path, text: str, **flags: Any) -> Config:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    named = {name.replace("__", "."): value for name, value in flags.items()}
    return load(file, flags=named, environ={"HOME": str(tmp_path)})


SEVERAL = """
[model]
ram_cache_bytes = 4000
name = "not inherited"
threads = 3
[[models]]
dir = "/models/big"
gpus = [0, 1]
aliases = ["large"]
[[models]]
dir = "/models/small"
name = "little"
threads = 1
[[models]]
dir = "/models/own"
ram_cache_bytes = 77
workers = 2
"""


def test_models_inherit_and_share_what_they_leave_out(tmp_path: Path) -> None:
    config = settings(tmp_path, SEVERAL)
    assert [m.name for m in config.served] == ["big", "little", "own"]
    assert [m.threads for m in config.served] == [3, 1, 3]
    assert [m.worker_count for m in config.served] == [2, 1, 2]
    # Three workers share what is everybody's; the third model has its own.
    assert [m.ram_cache_bytes for m in config.served] == [2666, 1333, 77]
    assert config.model is config.served[0]


def test_one_model_is_served_as_before_and_a_flag_goes_before_those_of_a_file(tmp_path: Path) -> None:
    assert [m.name for m in settings(tmp_path, "").served] == ["demo"]
    one = settings(tmp_path, SEVERAL, models=[], model__dir="/models/flag", model__name="flag")
    assert [m.name for m in one.served] == ["flag"]
    two = settings(tmp_path, SEVERAL, models=[{"dir": "/a/x"}, {"dir": "/a/y"}])
    assert [m.name for m in two.served] == ["x", "y"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[models]]\ndir = '/a/m'\n[[models]]\ndir = '/b/m'", "models: 'm' means two of them"),
        ("[[models]]\ndir = '/a/m'\naliases = ['n']\n[[models]]\ndir = '/b/n'", "models: 'n' means two of them"),
        ("[[models]]\ndir = '/a/m'\n[[models]]\ndirectory = '/b/m'", r"models\[1\]: \[model\] has no setting 'directory'"),
        ("[[models]]\nworkers = 65", r"models\[0\]: model.workers: .*64.*got 65"),
        ("models = 3", "models: a list of tables is expected"),
        ("[model]\nworkers = -1", "model.workers"),
    ],
)
def test_bad_models_are_told_by_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        settings(tmp_path, text)


def test_names_must_be_as_many_as_models() -> None:
    result = CliRunner().invoke(cli, ["serve", "--model", "/a", "--model", "/b", "--model-name", "one"])
    assert result.exit_code == 2
    assert "--model-name: got 1 for 2 models" in result.output


class Two:
    """A server over two fake models."""

    def __init__(self, tmp_path: Path) -> None:
        config = config_for_tests(server={"auth": "none"})
        models = settings(tmp_path, "[[models]]\ndir = '/m/one'\naliases = ['uno']\n[[models]]\ndir = '/m/two'").models
        config = msgspec.structs.replace(config, models=models, model=models[0])
        self.workers = {"one": FakeWorker(), "two": FakeWorker()}
        self.texts = {name: FakeText() for name in self.workers}
        for name, worker in self.workers.items():
            worker.default = answer(f"I am {name}")
        self.workers["two"].hello = msgspec.structs.replace(HELLO, max_context=50_000)
        served = tuple(Served(name, self.texts[name], self.workers[name]) for name in self.workers)
        store: Any = FakeStore()
        self.services = Services(config, served, store, ThreadPoolExecutor(1))
        app, _ = create_app(self.services, None)
        self.client = TestClient(app, base_url="http://127.0.0.1")  # pyright: ignore[reportArgumentType]


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def said(body: dict[str, Any]) -> str:
    return "".join(part["text"] for item in body["output"] for part in item.get("content", ()))


def test_each_model_answers_for_itself(two: Two) -> None:
    for asked, name in ((None, "one"), ("one", "one"), ("uno", "one"), ("two", "two")):
        body = {"input": "hi"} | ({} if asked is None else {"model": asked})
        made = two.client.post("/v1/responses", json=body).json()
        assert (made["model"], said(made)) == (name, f"I am {name}")
        assert len(two.texts[name].learned) == len(two.workers[name].starts)
    assert [len(worker.starts) for worker in two.workers.values()] == [3, 1]


def test_all_models_are_listed_and_an_unknown_one_names_them(two: Two) -> None:
    listed = two.client.get("/v1/models").json()["data"]
    assert [(m["id"], m["context_length"]) for m in listed] == [("one", 100_000), ("uno", 100_000), ("two", 50_000)]
    assert two.client.get("/v1/models/two").json()["context_length"] == 50_000
    for path, body in (
        ("/v1/responses", {"model": "three", "input": "x"}),
        ("/v1/chat/completions", {"model": "three", "messages": [{"role": "user", "content": "x"}]}),
    ):
        refused = two.client.post(path, json=body)
        assert refused.status_code == 404
        assert "one, uno, two" in refused.json()["error"]["message"]
    assert "one, uno, two" in two.client.get("/v1/models/three").json()["error"]["message"]


def test_a_session_over_both_models_is_listed_and_forgotten_in_both(two: Two) -> None:
    first = two.client.post("/v1/responses", json={"input": "hi", "model": "two", "prompt_cache_key": "k"}).json()
    second = {"input": "on", "model": "one", "previous_response_id": first["id"]}
    assert two.client.post("/v1/responses", json=second).status_code == 200
    (session,) = two.client.get("/v1/sessions").json()["data"]
    assert len(two.client.get(f"/v1/sessions/{session['id']}/checkpoints").json()["data"]) == 2
    assert two.client.post(f"/v1/sessions/{session['id']}/pin").status_code == 200
    assert two.client.delete(f"/v1/sessions/{session['id']}").status_code == 200
    assert [worker.forgotten for worker in two.workers.values()] == [[session["id"]]] * 2


def test_the_server_is_ready_when_every_model_is(two: Two) -> None:
    assert two.client.get("/readyz").json()["status"] == "ready"
    two.workers["two"].ready = False
    reply = two.client.get("/readyz")
    assert (reply.status_code, reply.json()["model"], reply.json()["status"]) == (503, "two", "starting")
    assert [model["status"] for model in reply.json()["models"]] == ["ready", "starting"]


def test_ids_of_one_tokenizer_are_no_aliases_under_another() -> None:
    book = MemoryBook()
    mine, other = OwnAliases(book, b"a"), OwnAliases(book, b"b")
    alias = Alias(ids=np.array([7], "<u4").tobytes())
    mine.add([(b"key", alias)])
    assert list(mine.find([b"key", b"else"])[b"key"]) == [alias]
    assert not other.find([b"key"])
