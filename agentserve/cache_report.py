"""What a turn reused, in the words of `agentserve.cache.report`."""

from __future__ import annotations

from typing import Any

from agentserve.interfaces import DivergenceReport, Rendered
from agentserve.protocol.server_events import CheckpointUsed, DivergencePart
from agentserve.request import TurnRequest
from agentserve.worker.messages import Matched


def cache_report(
    frame: Matched, rendered: Rendered, request: TurnRequest, report: DivergenceReport | None = None
) -> dict[str, Any]:
    """Fields of the cache report of one turn."""
    divergence = None
    if report is not None:
        divergence = DivergencePart(
            token_index=report.token_index,
            item_index=report.item if report.item >= 0 else None,
            cause=report.cause,
            before=report.before,
            after=report.after,
        )
    used = None
    if frame.position > 0:
        used = CheckpointUsed("" if frame.kind is None else frame.kind.value, frame.position)
    return {
        "prompt_tokens": len(rendered.ids),
        "reused_tokens": frame.position,
        "restored_from": frame.tier,
        "checkpoint": used,
        "divergence": divergence,
        "ignored_tools": tuple(t.type if t.name is None else f"{t.type}:{t.name}" for t in request.ignored_tools),
    }
