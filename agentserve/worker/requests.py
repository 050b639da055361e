"""Between the pipe's frames and the engine's types: what a turn asks of the engine, why one is refused, the load report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from agentserve.deadlines import Rates
from agentserve.worker.forecast import due_us, owner, share
from agentserve.worker.messages import Load, Memory, MemoryRow, ResizeExperts, StartTurn, TurnFailed
from agentserve.worker.ports import EnginePort
from agentserve.worker.turns import TurnRecord
from engine.errors import DeviceError, EngineError
from engine.types import EngineStats, HoldId, ModelInfo, Request, SamplingParams, StateSnapshot


def refusal_of(start: StartTurn, ids: np.ndarray, info: ModelInfo, *, running: bool) -> TurnFailed | None:
    """Why a turn cannot be begun at all, None if it can. ids: uint32 [n], its prompt. running: one of its id runs."""
    if running:
        return TurnFailed(start.turn_id, "invalid_value", "a turn with this id is running", "turn_id")
    if len(ids) == 0:
        return TurnFailed(start.turn_id, "invalid_value", "the prompt has no tokens, at least 1 is needed", "input")
    if len(ids) + 1 > info.max_context:
        message = f"the prompt has {len(ids)} tokens; this model serves at most {info.max_context} with the answer"
        return TurnFailed(start.turn_id, "context_length_exceeded", message, "input")
    if int(ids.max()) >= info.vocab_size:
        message = f"token id {int(ids.max())} is outside the vocabulary of {info.vocab_size}"
        return TurnFailed(start.turn_id, "invalid_value", message, "input")
    return None


def engine_request(turn: TurnRecord, info: ModelInfo, restore: StateSnapshot | HoldId | None, cuts: tuple[int, ...]) -> Request:
    """restore: the state to begin with. cuts: rising prompt positions where the state is to be held."""
    return Request(
        id=turn.id,
        token_ids=turn.ids.astype(np.int32),
        sampling=_sampling(turn.start, info),
        restore=restore,
        cuts=cuts,
        mask=turn.mask,
        due_us=due_us(turn),
        priority=turn.start.priority,
        share=share(turn),
        owner=owner(turn),
    )


def _sampling(start: StartTurn, info: ModelInfo) -> SamplingParams:
    wire = start.sampling
    return SamplingParams(
        max_tokens=wire.max_tokens if start.generate else 0,
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        seed=wire.seed,
        repetition_penalty=wire.repetition_penalty,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        logprobs=wire.logprobs,
        stop_token_ids=tuple(sorted({*info.eos_token_ids, *start.markers.turn_end})),
        stop=wire.stop,
    )


def memory_answer(engine: EnginePort, query: ResizeExperts) -> Memory:
    """Do what is asked of the device's memory, and say how it is divided then."""
    refused = ""
    if query.slots is not None:
        try:
            engine.resize_experts(query.slots)
        except DeviceError:
            raise
        except EngineError as error:
            refused = str(error)
    report = engine.memory
    return Memory(query.query_id, None if report is None else MemoryRow(**asdict(report)), refused)


def load_report(
    stats: EngineStats,
    rates: Rates,
    cache: tuple[Mapping[str, int], Mapping[str, int], Mapping[str, float]],
    own: Mapping[str, float],
) -> Load:
    """cache: StateBridge.figures(). own: the loop's counters."""
    cache_bytes, cache_checkpoints, counters = cache
    return Load(
        running=stats.running,
        waiting=stats.waiting,
        waiting_prefill_tokens=stats.waiting_prefill_tokens,
        prefill_tokens_per_s=float(rates.prefill_tokens_per_s),
        decode_tokens_per_s=1e6 / rates.decode_step_us,
        restore_bytes_per_s=float(rates.restore_bytes_per_s),
        free_pages=stats.free_pages,
        total_pages=stats.total_pages,
        cache_bytes=dict(cache_bytes),
        cache_checkpoints=dict(cache_checkpoints),
        counters={
            **counters,
            **own,
            "holds": stats.held - cache_checkpoints.get("device", 0),  # 0 but for a moment: each belongs to a checkpoint
            "prefill_tokens": stats.prefill_tokens,
            "decode_tokens": stats.decode_tokens,
            "slot_hits": stats.slot_hits,
            "slot_misses": stats.slot_misses,
            "preemptions": stats.preemptions,
            "pauses": stats.pauses,
            "expert_slots": stats.expert_slots,
            "memory_moves": stats.memory_moves,
            "memory_lent_bytes": stats.lent_bytes,
            "pinned_bytes": stats.pinned_bytes,
            "pinned_used_bytes": stats.pinned_used_bytes,
            "not_pinned_bytes": stats.not_pinned_bytes,
            "steps_ahead_used": stats.ahead_used,
            "steps_ahead_wrong": stats.ahead_wrong,
            "steps_ahead_ended": stats.ahead_ended,
            "steps_ahead_joined": stats.ahead_joined,
            "guesses": stats.guesses,
            "wrong_guesses": stats.wrong_guesses,
        },
    )
