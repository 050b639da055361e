"""A wrong value is answered with what is accepted there, wherever it stands: in a request, a file, a flag, a variable."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from msgspec import Struct

from agentserve.config import load
from agentserve.errors import ConfigError, InvalidValue
from agentserve.protocol.decode import decode, options_of
from agentserve.protocol.responses import ResponseCreate
from agentserve.schema_errors import explain


class Leaf(Struct):
    how: Literal["b", "a"] | None = None
    size: int = 0


class Tree(Struct):
    leaf: Leaf | None = None
    many: list[Leaf] = []
    named: dict[str, Leaf] = {}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"leaf": {"how": "x"}}, ".leaf.how"),
        ({"many": [{}, {"how": "x"}]}, ".many[1].how"),
        ({"named": {"k": {"how": "x"}}}, ".named[...].how"),
    ],
)
def test_what_is_accepted_is_found_at_any_depth(value: Any, path: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(value, Tree)
    assert explain(error.value, Tree) == ("got 'x'; accepted: a, b", path)


def test_other_errors_keep_their_words() -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({"leaf": {"size": "x"}}, Tree)
    assert explain(error.value, Tree) == ("Expected `int`, got `str`", ".leaf.size")


def test_a_request_is_told_the_values_of_a_field() -> None:
    with pytest.raises(InvalidValue, match="got 'explode'; accepted: continue, fail") as refused:
        decode('{"agentserve": {"on_miss": "explode"}}', ResponseCreate)
    assert refused.value.param == "agentserve.on_miss"
    with pytest.raises(InvalidValue, match="got 'some'; accepted: all, template"):
        options_of(ResponseCreate(metadata={"agentserve.retain": "some"}))


def test_a_field_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidValue, match="no such field; accepted: detach, events, normalise, on_miss, ") as refused:
        decode('{"agentserve": {"ttft_deadline": 5}}', ResponseCreate)
    assert refused.value.param == "agentserve.ttft_deadline"


SETTINGS = [
    ('[model]\ndevice = "tpu"', "file .*: model.device: got 'tpu'; accepted: auto, cpu, cuda"),
    ("[server]\nport = 99999", "server.port: .*65535, got 99999"),
    ("[server]\nprt = 1", r"\[server\] has no setting 'prt'; is 'port' meant\?"),
    ("[sever]\n", "the top level has no setting 'sever'; is 'server' meant"),
    ("[server]\ntoken = 1234", "server.token: Expected"),
]


@pytest.mark.parametrize(("text", "message"), SETTINGS)
def test_a_setting_is_told_by_its_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load(file, environ={})
    assert "1234" not in str(refused.value)
