"""Where results go, line by line, so that a run that is stopped loses nothing and goes on where it was."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import commit, machine

FILE = "gpu.jsonl"


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "host memory"


class Results:
    """state: a file that stays where the checkpoints are, and says what is done. out: gets all of it, and every new line.

    limit_s: no new measurement begins after this many seconds, or when one like the longest so far would end after it.
    """

    def __init__(self, state: Path, out: Path | None, limit_s: float, model: str, again: bool = False) -> None:
        self._state, self._model = state, model
        self._began, self._limit_s, self._longest_s = time.monotonic(), limit_s, 0.0
        self.lines: list[dict[str, Any]] = []
        if state.exists() and not again:
            # A line that was cut off by a kill is not there yet.
            self.lines = [json.loads(line) for line in state.read_text().splitlines() if line.endswith("}")]
        state.write_text("".join(json.dumps(line) + "\n" for line in self.lines))
        self._out = None if out is None else out / FILE
        if self._out is not None and self._out.parent != state.parent:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            known = set(self._out.read_text().splitlines()) if self._out.exists() else set()
            new = [text for text in (json.dumps(line) for line in self.lines) if text not in known]
            _append(self._out, new)

    def find(self, stage: str, **workload: Any) -> dict[str, Any] | None:
        """Figures of a measurement that is done, None if it is not."""
        for line in reversed(self.lines):
            if line["stage"] == stage and all(line["workload"].get(key) == value for key, value in workload.items()):
                return line["figures"]
        return None

    def room(self) -> bool:
        """Whether another measurement fits into the time."""
        return time.monotonic() - self._began + self._longest_s < self._limit_s

    def add(self, stage: str, workload: Mapping[str, Any], figures: Mapping[str, Any], took_s: float = 0.0) -> None:
        self._longest_s = max(self._longest_s, took_s)
        line = {
            "benchmark": "gpu",
            "stage": stage,
            "commit": commit(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {**machine(), "gpu": gpu_name()},
            "model": self._model,
            "workload": dict(workload),
            "figures": dict(figures),
        }
        self.lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        for path in {self._state, self._out} - {None}:
            assert path is not None
            _append(path, [text])


def _append(path: Path, lines: list[str]) -> None:
    with path.open("a") as file:
        file.writelines(text + "\n" for text in lines)
        file.flush()
        os.fsync(file.fileno())
