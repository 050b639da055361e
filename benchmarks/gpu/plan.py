"""How much is measured: sizes of every stage, at full size and tiny. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """shares: of experts resident, in per cent. repeats: of everything, ≥ 5 where it counts.

    decode_tokens: of one arm in one round; decode_warm: before them, uncounted; learn: of the arm that learns, once.
    prefix: tokens of the restored context; suffixes: tokens after it. turns: of the alternation, each `turn_suffix` tokens in
    and `turn_output` out, the first `turn_first` of them looked at by themselves. contexts: tokens of saved states.
    long_prompt: that comes while another stream decodes. ideal_tokens: over
    which caches are simulated. arms: ways to deal with misses that `decode` compares, () = all.
    """

    shares: tuple[int, ...]
    turn_shares: tuple[int, ...]
    repeats: int
    batches: tuple[int, ...]
    decode_tokens: int
    decode_warm: int
    learn: int
    prefix: int
    suffixes: tuple[int, ...]
    turns: int
    turn_suffix: int
    turn_output: int
    turn_first: int
    contexts: tuple[int, ...]
    long_prompt: int
    ideal_tokens: int
    arms: tuple[str, ...] = ()


FULL = Plan(
    shares=(25, 50, 84, 100),
    turn_shares=(25, 84),
    repeats=5,
    batches=(1, 4),
    decode_tokens=64,
    decode_warm=16,
    learn=720,
    prefix=8192,
    suffixes=(8, 16, 64, 256, 1024, 8192),
    turns=12,
    turn_suffix=64,
    turn_output=100,
    turn_first=16,
    contexts=(8192, 65536),
    long_prompt=8192,
    ideal_tokens=512,
)
TINY = Plan(
    shares=(50, 100),
    turn_shares=(50,),
    repeats=2,
    batches=(1, 2),
    decode_tokens=3,
    decode_warm=1,
    learn=2,
    prefix=24,
    suffixes=(2, 5),
    turns=2,
    turn_suffix=4,
    turn_output=6,
    turn_first=2,
    contexts=(24,),
    long_prompt=20,
    ideal_tokens=16,
)
