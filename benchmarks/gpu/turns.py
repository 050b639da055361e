"""Stages `suffix`, `alternate` and `interleave`: turns as agents have them."""

from __future__ import annotations

from random import Random
from typing import Any

from benchmarks.gpu.context import Context, percentiles, rounded, spread_of

AFTER = 16
"""Tokens decoded after each first token: between turns the slots hold what decoding wants."""


def suffix(context: Context) -> None:
    """Time to the first token of suffixes, cold and after a restored prefix."""
    context.measure("suffix", lambda: _suffixes(context), prefix=context.plan.prefix)


def _suffixes(context: Context) -> dict[str, Any]:
    plan, player, words = context.plan, context.player, context.words(1)
    prefix = words.take(plan.prefix)
    held = player.run(prefix, 0, hold=True)
    assert held.hold is not None
    after = min(AFTER, plan.turn_output)
    ttft: dict[tuple[str, int], list[float]] = {}
    order = [(kind, n) for n in plan.suffixes for kind in ("cold", "restored")]
    random = Random(0)
    ways: dict[tuple[str, int], dict[str, int]] = {}
    for index in range(plan.repeats + 1):
        random.shuffle(order)
        for kind, n in order:
            new = words.take(n, prefix[-1] if kind == "restored" else None)
            prompt = [*prefix, *new] if kind == "restored" else new
            before = _ways(context)
            answer = player.run(prompt, 1 + after, held.hold if kind == "restored" else None)
            if index:
                ttft.setdefault((kind, n), []).append(answer.ttft_s)
                ways[kind, n] = {way: count - before.get(way, 0) for way, count in _ways(context).items()}
    context.running.engine.release(held.hold)
    return {
        f"{kind} {n}": {"ttft_s": spread_of(values), "layers_by_way": ways[kind, n]}
        for (kind, n), values in sorted(ttft.items())
    }


def _ways(context: Context) -> dict[str, int]:
    model: Any = context.running.engine.model
    return dict(model.expert_pass.ways)


def alternate(context: Context) -> None:
    """A session: a short tool result in, an answer out, again and again on the same context."""
    plan = context.plan
    workload = {"prefix": plan.prefix, "suffix": plan.turn_suffix, "output": plan.turn_output}
    context.measure("alternate", lambda: _session(context), **workload)


def _session(context: Context) -> dict[str, Any]:
    plan, player, words, engine = context.plan, context.player, context.words(2), context.running.engine
    tokens = words.take(plan.prefix)
    hold = player.run(tokens, 0, hold=True).hold
    ttft: list[float] = []
    gaps: list[float] = []
    ratio: list[float] = []
    right = True
    for turn in range(plan.turns + 1):
        tokens += words.take(plan.turn_suffix, tokens[-1])
        answer = player.run(tokens, plan.turn_output, hold, hold=True)
        assert hold is not None
        engine.release(hold)
        hold = answer.hold
        right &= words.right(tokens, answer.tokens)
        tokens += answer.tokens
        if turn == 0:
            continue
        ttft.append(answer.ttft_s)
        first, steady = answer.gaps_ms(1, plan.turn_first + 1), answer.gaps_ms(plan.turn_first + 1)
        ratio.append((sum(steady) / len(steady)) / (sum(first) / len(first)))
        gaps += first + steady
    assert hold is not None
    engine.release(hold)
    return {
        "ttft_s": spread_of(ttft),
        "worst_ttft_s": rounded(max(ttft)),
        "gap_ms": rounded(percentiles(gaps)),
        "first_rate_of_steady": spread_of(ratio),
        "walked_right": right,
    }


def interleave(context: Context) -> None:
    """A long prompt comes while another stream decodes: the longest gap that the stream sees, and what the prompt pays."""
    context.measure("interleave", lambda: _interleaved(context), prompt=context.plan.long_prompt)


def _interleaved(context: Context) -> dict[str, Any]:
    plan, player, words = context.plan, context.player, context.words(3)
    quiet: list[float] = []
    during: list[float] = []
    worst: list[float] = []
    alone: list[float] = []
    beside: list[float] = []
    right = True
    for index in range(plan.repeats + 1):
        answer = player.run(words.take(plan.long_prompt), 1)
        prompt = words.take(8)
        limit = context.running.engine.max_context - len(prompt) - 1
        stream = player.start(prompt, limit)
        player.until(stream, plan.turn_output)
        before = len(stream.tokens)
        other = player.start(words.take(plan.long_prompt), 1)
        player.until(other, 1)
        gaps = stream.gaps_ms(before)
        player.stop()
        right &= words.right(prompt, stream.tokens)
        if index == 0:
            continue
        alone.append(answer.ttft_s)
        beside.append(other.ttft_s)
        quiet += stream.gaps_ms(plan.turn_first, before)
        during += gaps
        if gaps:
            worst.append(max(gaps))
    figures: dict[str, Any] = {
        "gap_ms_before": rounded(percentiles(quiet)),
        "ttft_s_alone": spread_of(alone),
        "ttft_s_beside": spread_of(beside),
        "walked_right": right,
        "tokens_during": len(during),
    }
    if during:
        figures |= {"gap_ms_during": rounded(percentiles(during)), "worst_gap_ms": spread_of(worst)}
    return figures
