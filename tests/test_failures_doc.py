"""docs/failures.md has a line for each of the 39 kinds, and the tests that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)))


def test_every_kind_has_a_test_or_a_reason() -> None:
    lines = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", TEXT, flags=re.M)
    assert [int(number) for number, _ in lines] == list(range(1, 40))
    assert all("::" in last or last.startswith("cannot occur: ") for _, last in lines)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    assert not name or re.search(rf"^(async )?def {name}\(", source, flags=re.M), f"{file} has no {name}"
