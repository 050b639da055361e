"""Blocks that come one by one, before there is a checkpoint of them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from statecache.checkpoint import Path, Rows
from statecache.errors import Collision, PayloadMismatch, TierFull
from statecache.keys import KeyChain, token_bytes
from statecache.shelf import Shelf
from statecache.tiers.ram import RamTier
from statecache.types import BLOCK_TOKENS, KvRun, Payload
from tests.statecache.world import LAYOUT, SALT, context

WIDTH = LAYOUT.kv_token_bytes


def path_of(tokens: np.ndarray, hash128=None) -> Path:
    ids = token_bytes(tokens)
    chain = KeyChain(b"n" * 16, SALT, **({} if hash128 is None else {"hash128": hash128}))
    chain.extend(ids)
    return Path(b"n" * 16, SALT, ids, chain.joined)


def rows(value: int) -> np.ndarray:
    return np.full((BLOCK_TOKENS, WIDTH), value, dtype=np.uint8)


def test_each_block_takes_over_the_hold_of_the_one_before_and_the_last_drop_frees_all():
    shelf, path = Shelf(RamTier(1 << 20), LAYOUT), path_of(context(1, 3 * BLOCK_TOKENS))
    tail = None
    for value in range(3):
        tail = shelf.append(path, tail, rows(value))
    assert shelf.stored_blocks(path) == (tail, 3)
    again = None
    for _ in range(3):
        again = shelf.append(path, again, rows(9))
    assert again is tail, "what is there is found, not stored again"
    assert [int(shelf.tier.read(block.extent.key, "kv")[0]) for block in shelf.blocks.values()] == [0, 1, 2]
    shelf.drop(again)
    assert len(shelf.blocks) == 3
    shelf.drop(tail)
    assert (shelf.blocks, shelf.tier.used_bytes) == ({}, 0)


def test_a_block_that_does_not_fit_changes_nothing():
    shelf, path = Shelf(RamTier(2000 + BLOCK_TOKENS * WIDTH), LAYOUT), path_of(context(1, 2 * BLOCK_TOKENS))
    tail = shelf.append(path, None, rows(1))
    used = shelf.tier.used_bytes
    with pytest.raises(TierFull):
        shelf.append(path, tail, rows(2) if WIDTH > 30 else np.zeros((BLOCK_TOKENS, 100 * WIDTH), np.uint8))
    assert (shelf.stored_blocks(path), shelf.tier.used_bytes) == ((tail, 1), used)
    shelf.drop(tail)
    assert shelf.blocks == {}


def test_a_key_of_another_path_is_refused():
    same = lambda data: b"k" * 16  # noqa: E731
    shelf = Shelf(RamTier(1 << 20), LAYOUT)
    shelf.append(path_of(context(1, BLOCK_TOKENS), same), None, rows(1))
    with pytest.raises(Collision):
        shelf.append(path_of(context(2, BLOCK_TOKENS), same), None, rows(1))


def test_rows_of_rising_ranges_are_those_of_the_payload_however_its_runs_are_cut():
    whole = np.arange(200 * WIDTH, dtype=np.uint32).astype(np.uint8).reshape(200, WIDTH)
    for cuts in ((0, 200), (0, 64, 128, 200), (0, 10, 100, 130, 200)):
        runs = tuple(KvRun(first, whole[first:end]) for first, end in pairwise(cuts))
        found = Rows(Payload(200, runs, {}, None))
        for first in range(0, 192, 64):
            assert np.array_equal(np.concatenate(found.between(first, first + 64)), whole[first : first + 64])
        assert np.array_equal(np.concatenate(found.between(192, 200)), whole[192:])
        with pytest.raises(PayloadMismatch):
            found.between(192, 201)
