"""Stage `decode`: every way to deal with misses, in turn on the same stream, so that all see the same machine."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import ARMS, HYBRID, RESIDENT_ARMS, WHOLE, Running
from benchmarks.gpu.context import Context, percentiles, rounded, spread_of
from benchmarks.gpu.ideal import hit_rates, uniform_like, walked


def decode(context: Context) -> None:
    some = {"arms": "; ".join(context.plan.arms)} if context.plan.arms else {}
    for batch in context.plan.batches:
        context.measure("decode", lambda batch=batch: _rounds(context, batch), batch=batch, **some)


def _rounds(context: Context, batch: int) -> dict[str, Any]:
    """Rounds of all arms, forward and backward in turn (A B C, C B A …); each begins with a few tokens that do not count."""
    plan, running, player = context.plan, context.running, context.player
    pool = running.pool
    arms = RESIDENT_ARMS if pool.resident else plan.arms or ARMS
    words = context.words(batch)
    total = (plan.repeats + 1) * len(arms) * (plan.decode_warm + plan.decode_tokens) + plan.learn + 2
    prompts = [words.take(8) for _ in range(batch)]
    answers = [player.start(prompt, total) for prompt in prompts]
    for answer in answers:
        player.until(answer, 1)
    names = ("rate", "gap_ms", "hits", "fetched", "wrong")
    seen: dict[str, dict[str, list[float]]] = {arm: {name: [] for name in names} for arm in arms}
    if not pool.resident:
        running.arms.use("auto")
        player.until(answers[0], len(answers[0].tokens) + plan.learn)
    for index in range(plan.repeats + 1):
        for arm in arms if index % 2 == 0 else reversed(arms):
            running.arms.use(arm)
            player.until(answers[0], len(answers[0].tokens) + plan.decode_warm)
            before, first, guesses = pool.totals(), len(answers[0].tokens), _guesses(running)
            player.until(answers[0], first + plan.decode_tokens)
            after = pool.totals()
            if index == 0:
                continue
            gaps = answers[0].gaps_ms(first)
            seen[arm]["gap_ms"] += gaps
            seen[arm]["rate"].append(1000 * batch * len(gaps) / sum(gaps))
            guessed, wrong = (b - a for a, b in zip(guesses, _guesses(running), strict=True))
            if guessed:
                seen[arm]["wrong"].append(wrong / guessed)
            fetches, _, hits, misses = (b - a for a, b in zip(before, after, strict=True))
            if hits + misses:
                seen[arm]["hits"].append(hits / (hits + misses))
                seen[arm]["fetched"].append(fetches / max(1, misses))
    right = all(words.right(p, a.tokens) for p, a in zip(prompts, answers, strict=True))
    running.arms.use("resident" if pool.resident else "auto")
    figures: dict[str, Any] = {"walked_right": right, "arms": {}}
    per_token = context.shape.layers * context.shape.top_k * context.shape.record_bytes
    for arm, values in seen.items():
        line: dict[str, Any] = {"tokens_per_s": spread_of(values["rate"]), "gap_ms": rounded(percentiles(values["gap_ms"]))}
        hit = sum(values["hits"]) / len(values["hits"]) if values["hits"] else 1.0
        line |= rounded({"hit_rate": hit, "missed_bytes_per_token": (1 - hit) * per_token})
        if values["fetched"]:
            line["fetched_of_misses"] = rounded(sum(values["fetched"]) / len(values["fetched"]))
        if values["wrong"]:
            line["wrong_guesses"] = rounded(sum(values["wrong"]) / len(values["wrong"]))
        figures["arms"][arm] = line
    if {HYBRID, WHOLE} <= set(arms):
        pairs = zip(seen[HYBRID]["rate"], seen[WHOLE]["rate"], strict=True)
        figures["hybrid_of_whole"] = spread_of([parts / whole for parts, whole in pairs])
    if not pool.resident:
        figures["chosen"] = running.arms.chosen(batch)
    figures["dense_bytes"] = _dense_bytes(context)
    figures["head_bytes"] = context.shape.vocab * context.shape.hidden * 2
    figures["routed_bytes"] = per_token
    if not pool.resident:
        trace = walked(context.trace, context.plan.ideal_tokens) if context.trace else None
        trace = uniform_like(context.shape, context.plan.ideal_tokens // 4) if trace is None else trace
        figures |= hit_rates(trace, running.slots)
    return figures


def _guesses(running: Running) -> tuple[int, int]:
    """Drawn tokens that the device has guessed so far, and of these the wrong ones."""
    stats = running.engine.stats()
    return stats.guesses, stats.wrong_guesses


def _dense_bytes(context: Context) -> int:
    """Weights that every token reads beside its experts: all but the embedding table."""
    from engine.gpu.weights import device_bytes

    model: Any = context.running.engine.model
    return device_bytes(model._decoder) - context.shape.vocab * context.shape.hidden * 2
