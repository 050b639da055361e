"""What a turn reused, in the words of `agentserve.cache.report`."""

from __future__ import annotations

from typing import Any

from agentserve.interfaces import DivergenceReport
from agentserve.prompt import Prompt
from agentserve.protocol.server_events import CheckpointUsed, DivergencePart, NormalisedPart
from agentserve.request import TurnRequest
from agentserve.session.divergence import Contexts
from agentserve.worker.messages import Matched


def cache_report(
    frame: Matched, prompt: Prompt, request: TurnRequest, contexts: Contexts, report: DivergenceReport | None = None
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
        "prompt_tokens": len(prompt.rendered.ids),
        "reused_tokens": frame.position,
        "restored_from": frame.tier,
        "checkpoint": used,
        "divergence": divergence,
        "ignored_tools": tuple(t.type if t.name is None else f"{t.type}:{t.name}" for t in request.ignored_tools),
        "normalised": _normalised(prompt, contexts, frame.position),
    }


def _normalised(prompt: Prompt, contexts: Contexts, reused: int) -> NormalisedPart | None:
    if not prompt.normalised:
        return None
    saved = None
    if prompt.as_sent is not None:
        saved = contexts.saved(prompt.request.salt, prompt.rendered.ids, prompt.as_sent, reused)
    return NormalisedPart(names=prompt.normalised, saved_tokens=saved)
