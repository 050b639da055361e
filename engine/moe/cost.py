"""What a layer's experts cost in time, by where they run, and the choices that follow. Integers only: bytes, nanoseconds, and
rates in bytes per microsecond (which is MB/s).

With m misses of S bytes, q of them fetched over the link and the rest computed on the CPU beside it:

    max(hits · S / B_hbm, q · S / B_link + q · S / B_hbm + t_copy, (m − q) · S / B_cpu + t_handoff) + t_merge

Of what is left to the CPU the device may take the last r of an expert's I inner rows, which it reads over the link and does not
keep: after its fetches (m − q) · S · r / I / B_direct + t_direct more for the link, as much less for the CPU. Where B_direct
was not measured no expert is divided.

Link and CPU read the same memory, so where both work their rates are those measured together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

NS_PER_US = 1000


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured on one machine for one format. *_mbs: bytes per microsecond, ≥ 1. link: what kernels read from pinned memory;
    copy: what copy engines move; both_*: link and CPU while the other works too. *_ns: fixed costs of a layer.

    cpu_tokens: tokens of an expert that the CPU computes in the time in which it reads the expert. gpu_gflops: of the device's
    matrix products with many rows. direct_mbs: what the experts' own kernels read from pinned memory while the CPU works,
    beside direct_ns for each layer; 0 = not known.
    """

    hbm_mbs: int
    link_mbs: int
    copy_mbs: int
    cpu_mbs: int
    both_link_mbs: int
    both_cpu_mbs: int
    copy_ns: int = 3_000
    handoff_ns: int = 8_000
    merge_ns: int = 4_000
    cpu_tokens: int = 8
    gpu_gflops: int = 50_000
    direct_mbs: int = 0
    direct_ns: int = 0

    def refitted(self, link_mbs: int | None, cpu_mbs: int | None) -> Rates:
        """With rates seen while serving (both paths at work) taken in by a quarter, so that one bad window decides nothing.
        What kernels read directly follows the link, over which it comes."""

        def toward(old: int, seen: int | None) -> int:
            return old if seen is None else max(1, (3 * old + seen) // 4)

        link = toward(self.both_link_mbs, link_mbs)
        direct = max(min(1, self.direct_mbs), self.direct_mbs * link // max(1, self.both_link_mbs))
        return replace(self, both_link_mbs=link, both_cpu_mbs=toward(self.both_cpu_mbs, cpu_mbs), direct_mbs=direct)


ASSUMED = Rates(hbm_mbs=500_000, link_mbs=20_000, copy_mbs=22_000, cpu_mbs=30_000, both_link_mbs=18_000, both_cpu_mbs=22_000)
"""A middling desktop: used until something was measured."""


def _ns(nbytes: int, mbs: int) -> int:
    return nbytes * NS_PER_US // max(1, mbs)


def layer_ns(rates: Rates, record_bytes: int, hits: int, misses: int, fetched: int, taken: int = 0, inter: int = 1) -> int:
    """The formula above. taken: r, of inter."""
    on_cpu = misses - fetched
    both = on_cpu > 0 and (fetched > 0 or taken > 0)
    link = rates.both_link_mbs if both else rates.link_mbs
    cpu = rates.both_cpu_mbs if both else rates.cpu_mbs
    arriving = fetched * (_ns(record_bytes, link) + _ns(record_bytes, rates.hbm_mbs)) + rates.copy_ns if fetched else 0
    if on_cpu and taken:
        arriving += on_cpu * _ns(record_bytes, rates.direct_mbs) * taken // inter + rates.direct_ns
    computing = on_cpu * _ns(record_bytes, cpu) * (inter - taken) // inter + rates.handoff_ns if on_cpu else 0
    return max(hits * _ns(record_bytes, rates.hbm_mbs), arriving, computing) + rates.merge_ns


SHARE_ROWS = 64
"""Inner rows are divided in steps of so many: rows of down are then read in whole cache lines, as gate and up always are."""
Division = tuple[int, int]
"""Of some misses, how many are fetched, and how many inner rows of each of the others the device computes over the link."""


@lru_cache(maxsize=64)
def divisions(rates: Rates, record_bytes: int, most: int, active: int, inter: int) -> tuple[Division, ...]:
    """The best for m = 0 … most. active: experts of a layer in a step; where some are equally fast that which fetches most,
    since what is fetched may be hit later, and of those the one that takes fewest rows. inter: of an expert, 0 = never divided.
    A division below whole experts is never slower by the formula than the best of whole ones, which is among those compared.
    It fetches one at least wherever that one would fetch: tables that never fetch leave in the slots what was there, and with
    locality that costs more than any division gains (docs/lab-notes.md).
    """
    q, m = np.arange(most + 1, dtype=np.int64)[None, :], np.arange(most + 1, dtype=np.int64)[:, None]
    best, chosen = None, np.zeros((most + 1, 2), dtype=np.int64)
    floor = np.zeros_like(m)
    for taken in range(0, max(1, inter) if rates.direct_mbs else 1, SHARE_ROWS):
        cost = _costs(rates, record_bytes, m, q, active, taken, max(1, inter))
        cost[q < floor] = np.iinfo(np.int64).max
        fetched = most - np.argmin(cost[:, ::-1], axis=1)
        least = np.take_along_axis(cost, fetched[:, None], axis=1)[:, 0]
        if not taken:
            floor = np.minimum(1, fetched)[:, None]
        better = least >= 0 if best is None else (least < best) | ((least == best) & (fetched > chosen[:, 0]))
        best = least if best is None else np.minimum(best, least)
        chosen[better] = np.stack([fetched, np.full_like(fetched, taken)], axis=1)[better]
    return tuple((int(fetched), int(taken)) for fetched, taken in chosen)


def decode_table(rates: Rates, record_bytes: int, most: int, active: int) -> tuple[int, ...]:
    """q*: of m misses, how many to fetch, for m = 0 … most, if experts are not divided. See `divisions`."""
    return tuple(fetched for fetched, _ in divisions(rates, record_bytes, most, active, 0))


def _costs(rates: Rates, record_bytes: int, m: np.ndarray, q: np.ndarray, active: int, taken: int, inter: int) -> np.ndarray:
    """layer_ns without t_merge for every m and q at once: a prefill of many experts asks for tens of thousands."""
    on_cpu, read = m - q, _ns(record_bytes, rates.hbm_mbs)
    both = (on_cpu > 0) & ((q > 0) | (taken > 0))
    link = np.where(both, _ns(record_bytes, rates.both_link_mbs), _ns(record_bytes, rates.link_mbs))
    cpu = np.where(both, _ns(record_bytes, rates.both_cpu_mbs), _ns(record_bytes, rates.cpu_mbs))
    arriving = np.where(q > 0, q * (link + read) + rates.copy_ns, 0)
    if taken:
        direct = _ns(record_bytes, rates.direct_mbs)
        arriving += np.where(on_cpu > 0, on_cpu * direct * taken // inter + rates.direct_ns, 0)
    computing = np.where(on_cpu > 0, on_cpu * cpu * (inter - taken) // inter + rates.handoff_ns, 0)
    cost = np.maximum(np.maximum(arriving, computing), np.maximum(0, active - m) * read)
    cost[on_cpu < 0] = np.iinfo(np.int64).max
    return cost


@lru_cache(maxsize=256)
def union_table(rates: Rates, record_bytes: int, most: int, tokens: int, top_k: int, experts: int) -> tuple[int, ...]:
    """The same for a prefill batch of `tokens`, whose experts have several tokens each: those with the fewest go to the CPU,
    where each takes as long as reading it or as computing its tokens, whichever is longer."""
    used = max(1, expected_union(tokens, top_k, experts))
    each = -(-tokens * top_k // used)
    reach = min(most, tokens * top_k)
    table = decode_table(_slowed(rates, each), record_bytes, reach, used)
    return table + table[-1:] * (most - reach)


def _slowed(rates: Rates, each: int) -> Rates:
    """Where experts have so many tokens each."""

    def slowed(mbs: int) -> int:
        return max(1, mbs * rates.cpu_tokens // max(rates.cpu_tokens, each))

    return replace(rates, cpu_mbs=slowed(rates.cpu_mbs), both_cpu_mbs=slowed(rates.both_cpu_mbs))


def expected_union(tokens: int, top_k: int, experts: int) -> int:
    """Experts that `tokens` tokens use if they choose evenly: the most that it comes to. E · (1 − (1 − k/E)^T), in 2⁻³²."""
    one = 1 << 32
    unused, base, exponent = one, one - one * min(top_k, experts) // max(1, experts), tokens
    while exponent:
        if exponent & 1:
            unused = unused * base >> 32
        base = base * base >> 32
        exponent >>= 1
    return min(experts, -(-experts * (one - unused) // one))


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What a layer's experts are expected to take beside its compute, by way. table: of m misses of the union, how many are
    fetched while the CPU computes the others; None = all. stream_ns None: it cannot be streamed."""

    union_ns: int
    stream_ns: int | None
    table: tuple[int, ...] | None = None


def plan_layer(
    rates: Rates,
    record_bytes: int,
    *,
    tokens: int,
    top_k: int,
    experts: int,
    missing: int,
    handoff_tokens: int,
    handoff_bytes: int,
    ring: int,
    compute_ns: int,
) -> LayerPlan:
    """How one layer's missing experts could come to a prefill batch.

    missing: experts of the layer without a slot. handoff_tokens: most that the CPU takes; handoff_bytes: of each of
    the batch's tokens, there and back, whatever it routes to. ring: slots that streaming may borrow.
    compute_ns: of the batch in a layer, behind which a stream hides.
    """
    used = expected_union(tokens, top_k, experts)
    wanted = -(-missing * used // max(1, experts))
    table = None
    union_ns = layer_ns(rates, record_bytes, 0, wanted, wanted)
    if tokens <= handoff_tokens:
        shares = union_table(rates, record_bytes, experts, tokens, top_k, experts)
        slow = _slowed(rates, -(-tokens * top_k // max(1, used)))
        shared_ns = layer_ns(slow, record_bytes, 0, wanted, shares[wanted]) + _ns(tokens * handoff_bytes, rates.link_mbs)
        if shares[wanted] < wanted and shared_ns < union_ns:
            table, union_ns = shares, shared_ns
    stream_ns = max(0, missing * _ns(record_bytes, rates.copy_mbs) - compute_ns) if ring >= 2 else None
    return LayerPlan(union_ns if missing else 0, stream_ns, table)


def streams(plans: list[LayerPlan]) -> bool:
    """Whether a pass streams its layers. All or none: a union changes owners on the device, and a ring that is out relies on
    their staying. A layer with little missing costs little either way."""
    times = [plan.stream_ns for plan in plans]
    if any(ns is None for ns in times):
        return False
    return sum(ns for ns in times if ns is not None) < sum(plan.union_ns for plan in plans)


RING_PART = 48
"""Most experts that are copied at a time. Every slot of the ring is one resident fewer, which must be streamed then."""

RING_LEAST = 12


def ring_part(rates: Rates, record_bytes: int, compute_ns: int) -> int:
    """Experts that a streamed pass copies at a time: as many as keep the link busy while a layer computes, which takes some
    four times what its operations say (`compute_ns`)."""
    return max(RING_LEAST, min(RING_PART, 4 * compute_ns // max(1, _ns(record_bytes, rates.copy_mbs))))


def ring_slots(slots: int, layers: int, experts: int, missing: int, part: int = RING_PART) -> int:
    """Slots that a streamed pass borrows: room for two parts of a layer's missing experts, but never more than half of the
    pool, whose other half keeps what decoding needs."""
    return max(0, min(2 * max(1, missing), 2 * part, slots // 2, slots - layers))


def keepers(counts: list[int], streamed: list[int], top: int) -> list[int]:
    """Of a layer's streamed experts, which may stay as residents: those with clearly more tokens than an even share, the
    hottest first, at most `top`. counts: tokens of each expert in the pass."""
    used = sum(1 for count in counts if count)
    even = sum(counts) // max(1, used)
    hot = [e for e in streamed if counts[e] * 2 > even * 3]
    return sorted(hot, key=lambda e: (-counts[e], e))[:top]
