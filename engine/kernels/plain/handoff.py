"""Between device and host: records that are fetched, and what the CPU executor is asked (engine/moe/handoff.py)."""

from __future__ import annotations

import time

import torch

Tensor = torch.Tensor


def fetch(bank: Tensor, pool: Tensor, work: Tensor, counts: Tensor) -> None:
    """Copy counts[0] records: bank[work[i, 0]] → pool[work[i, 1]]. Both uint8 [rows, record bytes]; the bank is host memory."""
    for flat_id, slot in work[: int(counts[0])].tolist():
        pool[slot] = bank[flat_id].to(pool.device)


def stamp(clock: Tensor, counts: Tensor, begin: bool) -> None:
    """Measure the fetch between two stamps. clock: int64 [4]: nanoseconds of fetches, records fetched, when the last one
    began."""
    now = time.monotonic_ns()
    if begin:
        clock[2] = now
    elif int(counts[0]):
        clock[0] += now - clock[2]
        clock[1] += int(counts[0])


def publish(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    shares: Tensor,
    epoch: Tensor,
    layer: int,
    request: Tensor,
    box_x: Tensor,
    box_ids: Tensor,
    box_weights: Tensor,
) -> None:
    """Ask the executor for the experts in ids (−1 = not its), if counts[1] says that there are any. The epoch comes last.

    shares: int32 [n]; with m misses (counts[3]) the executor leaves out the last shares[m] inner rows of each expert: see
    experts.bank_experts."""
    if not int(counts[1]):
        return
    tokens = len(x)
    box_x[:tokens] = x
    box_ids[:tokens] = ids
    box_weights[:tokens] = weights
    epoch += 1
    request[1], request[2], request[3] = layer, tokens, shares[min(int(counts[3]), len(shares) - 1)]
    request[0] = int(epoch)


def wait_reply(counts: Tensor, epoch: Tensor, reply: Tensor, limit_us: int, status: Tensor) -> None:
    """Wait for the reply to this request, limit_us at most. status: 0, or 1 = no reply, 2 = it says that it failed; [1] epoch.

    With a status from an earlier layer nothing is waited for: the step is lost, and ends soon."""
    if not int(counts[1]) or int(status[0]):
        return
    seen, wanted, until = reply.numpy(), int(epoch), time.monotonic_ns() + 1000 * limit_us
    while int(seen[0]) != wanted:
        if time.monotonic_ns() > until:
            status[0], status[1] = 1, wanted
            return
        time.sleep(0)
    if seen[1]:
        status[0], status[1] = 2, wanted
