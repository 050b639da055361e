"""What a step begins with: tables from the host by turns, and tokens of the step before from the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ShapeMismatch
from engine.kernels import plain

from .common import few, ints

pytest.importorskip("triton", reason="needs triton")
from engine.kernels import triton as ops

SETS = pytest.mark.parametrize("kernels", [ops, plain], ids=["triton", "plain"])
LAST, FIRST = 2**31 - 1, -(2**31)


@SETS
@few
@given(data=st.data(), rows=st.integers(1, 9), tables=st.integers(1, 5), turn=st.sampled_from([0, 1, 6, LAST - 1, LAST]))
def test_tables_are_those_of_the_turn_and_negative_tokens_name_rows_of_the_step_before(kernels, data, rows, tables, turn):
    numbers = st.integers(-1, 10_000)
    tokens = st.lists(st.integers(-rows, 10_000), min_size=rows, max_size=rows)
    other = st.lists(st.lists(numbers, min_size=rows, max_size=rows), min_size=tables - 1, max_size=tables - 1)
    sides = [[data.draw(tokens), *data.draw(other)] for _ in range(2)]
    before = data.draw(st.lists(numbers, min_size=rows, max_size=rows))
    told, guesses, count = ints(sides), ints(before), ints([turn])
    into, found = ints([[-9] * rows] * tables), ints([[-9] * (rows + 1)] * 2)
    kernels.begin(told, guesses, count, into, found)
    now = FIRST if turn == LAST else turn + 1
    assert count.tolist() == [now]
    mine = sides[now & 1]
    assert into.tolist() == [[before[-1 - token] if token < 0 else token for token in mine[0]], *mine[1:]]
    assert found[now & 1].tolist() == [-9] * rows + [now]
    assert found[1 - (now & 1)].tolist() == [-9] * (rows + 1)
    assert (told.tolist(), guesses.tolist()) == (sides, before)


def test_tables_of_another_shape_are_refused():
    with pytest.raises(ShapeMismatch, match="begin"):
        ops.begin(ints([[[0, 0]]] * 2), ints([0]), ints([0]), ints([[0, 0]]), ints([[0] * 3] * 2))
