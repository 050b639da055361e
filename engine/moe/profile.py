"""Measured rates, kept in a file: one entry for each machine and record shape. A file that cannot be read is no file."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

from engine.kernels import cpu
from engine.moe.cost import Rates

log = logging.getLogger(__name__)
VERSION = 1


def machine_key(device: str | None, threads: int) -> str:
    """What rates are measured on: device, processor, threads and instruction set of the executor."""
    kernels = cpu.isa() if cpu.available() else "torch"
    return f"{device or 'no device'} | {_processor()} | {threads} threads | {kernels}"


def record_key(hidden: int, inter: int, dtype: str) -> str:
    return f"{dtype} {hidden}x{inter}"


def load(path: Path, machine: str, record: str) -> Rates | None:
    """The rates of this machine for this record, None unless all of them were measured."""
    found = _read(path).get(machine, {}).get(record, {})
    names = [field.name for field in fields(Rates)]
    if not all(isinstance(found.get(name), int) and found[name] >= 0 for name in names):
        return None
    return Rates(**{name: found[name] for name in names})


def entries(path: Path, machine: str) -> dict[str, dict[str, int]]:
    """What was measured on a machine, by record; not always all of it."""
    return _read(path).get(machine, {})


def save(path: Path, machine: str, record: str, measured: Rates | Mapping[str, int]) -> None:
    """Add or replace one entry; others stay. measured: all rates, or those that could be measured."""
    known = _read(path)
    values = asdict(measured) if isinstance(measured, Rates) else dict(measured)
    known.setdefault(machine, {})[record] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = json.dumps({"version": VERSION, "machines": known}, indent=1, sort_keys=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(whole + "\n")
    beside.replace(path)


def _read(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    try:
        whole = json.loads(path.read_text())
        if whole["version"] == VERSION and all(isinstance(entry, dict) for entry in whole["machines"].values()):
            return whole["machines"]
        log.warning("measured rates are of another version and not used file=%s", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("measured rates cannot be read and are not used file=%s error=%s", path, error)
    return {}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
