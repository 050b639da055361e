"""What an examination comes to, line by line. Shape only; doctor.py and running.py fill it in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. hint: what to do, empty if nothing."""

    name: str
    verdict: Verdict
    what: str
    hint: str = ""
