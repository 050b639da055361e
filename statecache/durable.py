"""A state cache that outlives its process: memory tier, disk tier, background writer, put together and taken apart in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from statecache.directory import CLAIM_WAIT_S, folder_of, make_room
from statecache.errors import SegmentBad, TierFailed
from statecache.index.connect import connect
from statecache.index.ledger import Ledger
from statecache.index.radix import RadixIndex
from statecache.index.tables import metadata
from statecache.place import Place
from statecache.policy import Policy
from statecache.recover import Progress
from statecache.staging import fitting_ladder
from statecache.store import StateCache
from statecache.stretches import Join, separate
from statecache.tiers.base import Take, ordinary
from statecache.tiers.disk import DiskTier
from statecache.tiers.ram import RamTier
from statecache.types import Layout
from statecache.writer import Writer

log = logging.getLogger(__name__)
USES_S = 60.0
"""Between updates of when checkpoints were used."""
ROWS_S = 60.0
MOST_ROWS = 256
"""Changes that wait to be told to the index: for so long at most, and so many."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """root: directory of all namespaces. budget_bytes: of all of them together, 0 = no disk tier. reserve_bytes: free space
    that is left to others. index_url: SQLAlchemy URL of the durable index, "" = none.
    worker: which of the processes that serve the namespace side by side this is; each has a directory and rows of its own.
    beside: labels (see directory.py) of all workers that share the budget now, this one among them; none = it has it alone.
    bytes_per_hour: most that is written, 0 = no limit. claim_wait_s: for another process to let go.
    """

    root: Path
    budget_bytes: int
    reserve_bytes: int = 2 << 30
    bytes_per_hour: int = 0
    claim_wait_s: float = CLAIM_WAIT_S
    index_url: str = ""
    worker: int = 0
    beside: tuple[str, ...] = ()


class SavedStates:
    """The cache of one model with what keeps it durable. writer: None without a disk tier. Close it at the end."""

    def __init__(
        self, cache: StateCache, writer: Writer | None = None, place: Place | None = None, ledger: Ledger | None = None
    ) -> None:
        self.cache = cache
        self.writer = writer
        self.ledger = ledger
        self._place = place
        self.ladder_tokens = cache.policy.ladder_tokens
        self.others_bytes = 0
        """Of models that do not run, on the same disk, which share the budget."""
        self.sharers = 1
        """Workers that run and divide the rest of it, this one among them."""

    def want(self, checkpoint_ids: Sequence[str]) -> None:
        """These should outlive the process. Returns at once."""
        if self.writer is not None:
            self.writer.want(checkpoint_ids)

    def set_budgets(self, ram_bytes: int | None, disk_bytes: int | None) -> str:
        """Change them until the process ends (None = as it is); cache.trim() then evicts what is over. Why not, or nothing.

        disk_bytes: of all models together, as in DiskSettings.
        """
        if disk_bytes is not None:
            if self.writer is None:
                return "there is no disk tier: it was switched off or could not be used when the server started"
            self.cache.set_budget("disk", max(0, disk_bytes - self.others_bytes) // self.sharers)
        if ram_bytes is not None:
            self.cache.set_budget("ram", ram_bytes)
            if self.writer is not None:
                ladder_tokens = fitting_ladder(self.ladder_tokens, ram_bytes, self.cache.layout)
                self.cache.policy = replace(self.cache.policy, ladder_tokens=ladder_tokens)
        return ""

    def on_written(self, call: Callable[[], None]) -> None:
        """call(): from the writing thread, whenever it has nothing left to write."""
        if self.writer is not None:
            self.writer.on_idle = call

    def close(self, limit_s: float = 60.0, *, everything: bool = True) -> None:
        """Write what only memory has, newest first, for `limit_s` seconds at most; then let go of the directory.

        everything False: only what was chosen to be written.
        """
        if self.writer is not None:
            done = self.writer.close(limit_s, everything=everything)
            log.info("saved states written back complete=%s", done)
        if self.ledger is not None:
            self.ledger.note_uses(_epoch(self.cache.uses()))
            self.ledger.close()
        if self._place is not None:
            self._place.close()


def open_states(
    namespace: bytes,
    layout: Layout,
    ram_bytes: int,
    disk: DiskSettings | None = None,
    *,
    model: str = "",
    policy: Policy | None = None,
    prepare: Callable[[Engine], object] = metadata.create_all,
    progress: Progress = lambda fraction, what: None,
    clock: Callable[[], float] = time.monotonic,
    take: Take = ordinary,
    join: Join = separate,
) -> SavedStates:
    """Open or make the saved states of a namespace. A disk that cannot be used is a warning, and memory alone is used.

    take: where the states lie in memory. join: arrays that lie side by side there, as one.
    prepare: brings the schema of the durable index up to date. progress: told while states are looked for.
    """
    tiers: list[RamTier | DiskTier] = [RamTier(ram_bytes, take=take)]
    place: Place | None = None
    budget = 0
    if disk is not None and disk.budget_bytes > 0 and ram_bytes > 0:
        try:
            folder = folder_of(disk.root, namespace, disk.worker)
            place = Place(folder, namespace, model, layout, disk.worker, clock)
            place.open(disk.claim_wait_s, lambda: progress(0.0, "waiting for another worker to end"))
            budget = make_room(disk.root, folder, disk.budget_bytes, disk.beside)
            tiers.append(DiskTier(folder, budget, reserve_bytes=disk.reserve_bytes, take=take))
        except (OSError, TierFailed) as error:
            log.warning("no saved states on disk: %s", error)
    policy = policy or Policy()
    ladder_tokens = policy.ladder_tokens
    if len(tiers) > 1:
        policy = replace(policy, ladder_tokens=fitting_ladder(policy.ladder_tokens, ram_bytes, layout))
    cache = StateCache(
        namespace,
        layout,
        tiers=tiers,
        index=RadixIndex(),
        policy=policy,
        clock=clock,
        write_behind=len(tiers) > 1,
        take=take,
        join=join,
    )
    if len(tiers) == 1:
        return SavedStates(cache, None, place)
    assert disk is not None
    assert place is not None
    tier = tiers[1]
    assert isinstance(tier, DiskTier)
    ledger = _open_ledger(disk, namespace, prepare)
    began = time.monotonic()
    try:
        found = _recover(cache, tier, ledger, progress)
        log.info("checkpoints found count=%d bytes=%d s=%.2f", found, tier.used_bytes, time.monotonic() - began)
    except OSError as error:
        log.warning("saved states on disk were not read: %s", error)
    after_copies = (lambda: USES_S) if ledger is None else _AfterCopies(cache, ledger, clock)
    before_copy = _BeforeCopy(cache, tier, place)
    hourly = disk.bytes_per_hour
    writer = Writer(cache, bytes_per_hour=hourly, clock=clock, before_copy=before_copy, after_copies=after_copies)
    states = SavedStates(cache, writer, place, ledger)
    states.ladder_tokens, states.sharers = ladder_tokens, max(1, len(disk.beside))
    states.others_bytes = disk.budget_bytes - budget * states.sharers
    return states


class _BeforeCopy:
    """Makes the directory again when somebody has deleted it; what memory has of what lay there is written again."""

    def __init__(self, cache: StateCache, tier: DiskTier, place: Place) -> None:
        self._cache = cache
        self._tier = tier
        self._place = place
        self._whole = True

    def __call__(self) -> None:
        """Raises TierFailed if it cannot be used."""
        self._whole &= self._place.look()
        if not self._whole:
            lost = self._cache.lose(self._tier.name, self._tier.reopen())
            self._whole = True
            log.warning("the directory of saved states is made again checkpoints_lost=%d", lost)


class _AfterCopies:
    """Brings the ledger in step, some seconds of changes in one transaction; once in a while also with what was used.

    A transaction costs about as much as what it tells of, and a row that a crash takes is read from its file again.
    """

    def __init__(self, cache: StateCache, ledger: Ledger, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._ledger = ledger
        self._clock = clock
        self._uses_at = clock()
        self._rows_at = self._uses_at - ROWS_S

    def __call__(self) -> float:
        """Seconds until it is to be called again."""
        now = self._clock()
        if now - self._uses_at > USES_S:
            self._uses_at = now
            self._ledger.note_uses(_epoch(self._cache.uses()))
        waits_s = self._rows_at + ROWS_S - now
        if waits_s > 0 and self._ledger.waiting < MOST_ROWS and not self._ledger.urgent:
            return waits_s if self._ledger.waiting else USES_S
        if self._ledger.waiting:
            self._rows_at = now
            self._ledger.flush()
        return ROWS_S if self._ledger.waiting else USES_S


def _open_ledger(disk: DiskSettings, namespace: bytes, prepare: Callable[[Engine], object]) -> Ledger | None:
    if not disk.index_url:
        return None
    try:
        return Ledger(connect(disk.index_url), namespace, worker=disk.worker, prepare=prepare)
    except (SQLAlchemyError, ValueError, OSError) as error:
        log.warning("no checkpoint index: %s", error)
        return None


def _recover(cache: StateCache, tier: DiskTier, ledger: Ledger | None, progress: Progress) -> int:
    """Find the checkpoints on disk, opening only files that the ledger does not know; then bring the ledger in step."""
    if ledger is None:
        return cache.recover(progress=progress)
    known = ledger.known()
    found = cache.recover(known, progress, ledger.users())
    sizes = tier.sizes()
    for key in known.keys() - sizes.keys():
        ledger.note(key, None, 0)
    for key, nbytes in sizes.items():
        if key not in known or known[key].nbytes != nbytes:
            with contextlib.suppress(SegmentBad):
                ledger.note(key, tier.header(key), nbytes)
    tier.on_change = ledger.note
    cache.on_member(ledger.note_member)
    ledger.flush()
    return found


def _epoch(uses: Iterable[tuple[bytes, int, float]]) -> list[tuple[bytes, int, float]]:
    now = time.time()
    return [(key, hits, now - age_s) for key, hits, age_s in uses]
