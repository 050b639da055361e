"""Sizes and tables as the commands show them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from agentserve.cli import shapes


@pytest.mark.parametrize(
    ("nbytes", "said"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (10_485_760, "10 MiB"), (3 << 29, "1.5 GiB")]
)
def test_a_size_is_in_the_largest_unit_of_which_there_is_one(nbytes: int, said: str) -> None:
    assert shapes.size(nbytes) == said


def test_one_token_is_not_plural() -> None:
    assert [shapes.many(n, "token") for n in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]


def test_a_table_of_seven_columns_fits_into_eighty_characters_uncut() -> None:
    columns = ("saved states of", "namespace", "checkpoints", "extents", "size", "last start", "bad")
    row = ("Qwen3.6-35B-A3B", "56edb425", "12345", "1234", "1023 KiB", "12 hours ago", "–")
    made = shapes.table(*columns, left=("saved states of", "namespace", "last start"))
    made.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=80).print(made)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert len(lines) == 3  # headings, a rule, the row
    assert all(name in lines[0] for name in columns)
    assert all(cell in lines[2] for cell in row)
