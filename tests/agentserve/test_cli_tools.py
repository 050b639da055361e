"""The tools that the demo executes stay inside their directory and evaluate arithmetic only."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentserve.cli.tools import TOOLS, Toolbox, ToolError, calculate


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    (tmp_path / "work" / "notes").mkdir(parents=True)
    (tmp_path / "work" / "notes" / "a.txt").write_text("alpha\nbeta = 3\n")
    (tmp_path / "secret.txt").write_text("secret")
    return Toolbox(tmp_path / "work")


def test_files_are_listed_read_and_searched(toolbox: Toolbox) -> None:
    assert toolbox.call("list_files", '{"path": "."}') == "notes/"
    assert toolbox.call("list_files", '{"path": "notes"}') == "a.txt"
    assert toolbox.call("read_file", '{"path": "notes/a.txt"}') == "alpha\nbeta = 3"
    assert toolbox.call("search_files", '{"pattern": "beta", "path": "notes"}') == '{"file": "notes/a.txt", "line": 2}'


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("read_file", '{"path": "../secret.txt"}'),
        ("read_file", '{"path": "missing"}'),
        ("read_file", '{"path": "notes"}'),
        ("read_file", "{"),
        ("read_file", "[]"),
        ("read_file", '{"file": "a"}'),
        ("delete_file", "{}"),
        ("calculate", '{"expression": "__import__(1)"}'),
        ("search_files", '{"pattern": "gamma", "path": "notes"}'),
    ],
)
def test_whatever_cannot_be_done_is_told_to_the_model(toolbox: Toolbox, name: str, arguments: str) -> None:
    assert toolbox.call(name, arguments).startswith("error: ")


@given(st.integers(-999, 999), st.integers(-999, 999), st.sampled_from("+-*"))
def test_arithmetic_agrees_with_python(a: int, b: int, sign: str) -> None:
    wanted = {"+": a + b, "-": a - b, "*": a * b}[sign]
    assert calculate(f"{a} {sign} ({b})") == str(wanted)


@pytest.mark.parametrize("expression", ["2 ** 9999999", "1/0", "a", "'x' * 9", "(" * 500 + "1" + ")" * 500, "1 if 1 else 2"])
def test_what_is_not_plain_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ToolError):
        calculate(expression)


def test_every_declared_tool_exists(toolbox: Toolbox) -> None:
    for tool in TOOLS:
        assert "no tool named" not in toolbox.call(tool["name"], "{}")
