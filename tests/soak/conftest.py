"""A soak takes as long as it is asked to, and a while to begin and to come to rest; that is no test that hangs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

BESIDE_S = 300.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    limit_s = float(os.environ.get("SOAK_MINUTES", "0")) * 60 + BESIDE_S
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(limit_s))
