"""How many examples a dear property gets: all in `make test-full` (TESTS_FULL), fewer elsewhere. Each run draws others."""

from __future__ import annotations

import os

FULL = os.environ.get("TESTS_FULL") == "1"


def examples(quick: int, full: int) -> int:
    return full if FULL else quick
