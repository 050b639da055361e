"""What `serve` says while it starts."""

from __future__ import annotations

import io
import sys

import pytest

from agentserve.cli.serve import LoadProgress, _say
from agentserve.worker.messages import Loading


def test_loading_says_each_part_and_tenth_once_and_nothing_once_it_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    progress = LoadProgress()
    frames = [(0.0, "starting"), (0.41, "reading"), (0.44, "reading"), (1.0, "ready"), (0.0, "looking"), (0.5, "looking")]
    for fraction, what in frames:
        progress.loading(Loading(fraction, what))
    progress.close()
    progress.loading(Loading(0.0, "starting"))  # a worker that is started anew
    lines = [line.removeprefix("agentserve: loading: ") for line in capsys.readouterr().err.splitlines()]
    assert lines == ["starting", "reading, 41%", "looking", "looking, 50%"]


def test_a_terminal_gets_the_same_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = LoadProgress()
    progress.loading(Loading(0.5, "reading"))
    assert terminal.getvalue() == "agentserve: loading: reading, 50%\n"


def test_a_line_and_its_end_are_one_write() -> None:
    class Unbuffered(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.writes: list[str] = []

        def write(self, s: str, /) -> int:
            self.writes.append(s)
            return len(s)

    out = Unbuffered()
    _say("ready (cpu)", out)
    assert out.writes == ["agentserve: ready (cpu)\n"]
