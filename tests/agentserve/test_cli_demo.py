"""What `agentserve demo` prints at its end."""

from __future__ import annotations

import io

from rich.console import Console

from agentserve.cli.connect import TurnFigures
from agentserve.cli.demo import WIDTH, Row, responses_table


def test_the_last_table_fits_its_columns_without_a_break() -> None:
    figures = TurnFigures(
        prompt_tokens=1234,
        reused_tokens=1234,
        output_tokens=400,
        restored_from="device",
        checkpoint="tool_result @ 1234",
        divergence="tool_output_changed @ 1234",
        deadline_ms=30_000,
        deadline="missed",
        ttft_ms=9999,
    )
    printed = io.StringIO()
    Console(width=WIDTH, file=printed).print(responses_table([Row("10", figures)]))
    (line,) = (one for one in printed.getvalue().splitlines() if "1234" in one)
    assert len(line.rstrip()) <= WIDTH == 100
    for cell in ("tool_result, device", "tool_output_changed @ 1234", "9999 ms missed", "400"):
        assert cell in line
