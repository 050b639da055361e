"""How long a step takes on machines that are not here. Integers; µs and bytes.

The rates of prefill and of restores are those of traces/rates.py, with their sources. Assumed beyond them: what a pass costs
before its first token (a prefill of few tokens needs most of a layer's experts), decode beside other rows, and attention over
the context. Ratios between policies on one machine are what counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.traces.rates import H200 as H200_RATES
from benchmarks.traces.rates import KV_TOKEN_BYTES, STATE_BYTES
from benchmarks.traces.rates import LAPTOP as LAPTOP_RATES
from engine.scheduler.pace import Work


@dataclass(frozen=True)
class Machine:
    """pass_us: a step with prefill before its first token. token_ns: each prompt token. pair_ps: each token that one looks back
    on. decode_us: a step for one row, row_us: each further one, context_ps: each token that rows look back on. ram, disk: bytes
    per second of a restore. chunk: prompt tokens per step. kv_token_bytes, state_bytes: what a saved state weighs. rows:
    requests at once. ram_bytes, disk_bytes: room for saved states. most_context: tokens that it serves.
    """

    name: str
    pass_us: int
    token_ns: int
    pair_ps: int
    decode_us: int
    row_us: int
    ram: int
    disk: int
    context_ps: int = 0
    chunk: int = 512
    kv_token_bytes: int = KV_TOKEN_BYTES
    state_bytes: int = STATE_BYTES
    rows: int = 16
    ram_bytes: int = 32 << 30
    disk_bytes: int = 256 << 30
    most_context: int = 65_536

    def step_us(self, work: Work) -> int:
        """One step of decode rows and prefill tokens together."""
        attention = (work.pairs * self.pair_ps + work.context * self.context_ps) // 1_000_000
        if not work.prefill:
            return attention + (self.decode_us + self.row_us * (work.rows - 1) if work.rows else 0)
        # The experts that decoding needs are read by the pass anyway.
        return attention + self.pass_us + work.prefill * self.token_ns // 1000 + self.row_us * work.rows

    def restore_us(self, tokens: int, tier: str) -> int:
        """Bringing back a state of so many tokens from "ram" or "disk"."""
        return self.read_us(tokens * self.kv_token_bytes + self.state_bytes, tier) if tokens else 0

    def read_us(self, nbytes: int, tier: str) -> int:
        return nbytes * 1_000_000 // (self.disk if tier == "disk" else self.ram)


LAPTOP = Machine(
    "laptop",
    pass_us=150_000,
    token_ns=round(1e9 / LAPTOP_RATES.prefill),
    pair_ps=20_000,
    decode_us=50_000,
    row_us=20_000,
    ram=round(LAPTOP_RATES.ram),
    disk=round(LAPTOP_RATES.disk),
)
"""Decode: 20 tokens a second alone, three rows twice as slow."""
H200 = Machine(
    "H200",
    pass_us=250_000,
    token_ns=round(1e9 / H200_RATES.prefill),
    pair_ps=300,
    decode_us=18_000,
    row_us=5_000,
    ram=round(H200_RATES.ram),
    disk=round(H200_RATES.disk),
    chunk=4096,
    rows=32,
    ram_bytes=64 << 30,
    disk_bytes=1 << 40,
    most_context=131_072,
)
"""Experts streamed from the host: a quarter of a second for any pass. Decode: 55 tokens a second alone."""
SMALL = Machine(
    "small",
    pass_us=3_000,
    token_ns=85_000,
    pair_ps=24_000,
    decode_us=2_000,
    row_us=600,
    context_ps=80_000,
    ram=10_000_000_000,
    disk=2_000_000_000,
    kv_token_bytes=8,
    state_bytes=64,
)
"""About what two cores with AVX2 do with the embedded model, from the processor time of one thread; for lab runs that should
look like a real one."""
INSTANT = Machine("instant", 0, 0, 0, 0, 0, 1 << 50, 1 << 50, kv_token_bytes=8, state_bytes=64, rows=256)
"""Takes no time: what is left is the server's own."""
BEATS = tuple(
    Machine(f"beat{rate}", 1_000, 0, 0, 1_000_000 // rate, 0, 1 << 50, 1 << 50, kv_token_bytes=8, state_bytes=64, rows=256)
    for rate in (20, 50, 100)
)
"""A token for everybody so many times a second."""
MACHINES = {machine.name: machine for machine in (LAPTOP, H200, SMALL, INSTANT, *BEATS)}
