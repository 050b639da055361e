"""An index that a flipped bit or another program changed: every state is found, nothing fails, and it is whole again after."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from tests.statecache.test_failures import best
from tests.statecache.test_index import filled, rows, states
from tests.statecache.world import close_books, context, save

ODD_VALUES = [
    [
        "tokens = 'x'",
        "salt = 200000000000",
        "block_key = 7, parent = -3",
        "used_at = 'never'",
        "used_at = -9e999",
        "hits = 'a'",
    ],
    [
        "hits = 9e18",
        "start = '1.5', kind = x'ff00'",
        "position = -64, item = 9000000000000000000",
        "segment = 'abc'",
        "what = 7",
    ],
    ["salt = zeroblob(32) WHERE what = 'logits'"],
]


@pytest.mark.parametrize("odd", ODD_VALUES, ids=["types", "ranges", "logits"])
def test_rows_that_make_no_sense_are_settled_by_the_files(tmp_path, odd):
    """SQLite keeps any type in any column, and a flipped bit can change which one it is. Each row gets a value of its own."""
    url = f"sqlite:///{tmp_path / 'checkpoints.db'}"
    tokens = filled(tmp_path / "states", url)
    with closing(sqlite3.connect(tmp_path / "checkpoints.db")) as connection:
        for values, (row,) in zip(odd, connection.execute("SELECT rowid FROM segments").fetchall(), strict=False):
            connection.execute(f"UPDATE segments SET {values}" + ("" if "WHERE" in values else f" WHERE rowid = {row}"))
        connection.execute("INSERT INTO members SELECT namespace, 'abc', x'ff', 'yes', 0.5 FROM segments LIMIT 1")
        connection.commit()
    again = states(tmp_path / "states", url)
    assert best(again.cache, tokens) == 1500
    cache = again.cache
    cache.set_budget("disk", cache.stats().tiers["disk"].used_bytes - 1)
    while cache.trim():  # eviction counts with what the rows said
        close_books(cache)
    again.close()
    assert rows(url).keys() == {bytes.fromhex(p.stem) for p in tmp_path.glob("states/*/??/*.safetensors")}


@pytest.mark.parametrize("theirs", [False, True], ids=["alone", "beside another's tables"])
def test_an_index_whose_tables_changed_is_written_anew_unless_others_keep_theirs_in_it(tmp_path, caplog, theirs):
    file = tmp_path / "checkpoints.db"
    url = f"sqlite:///{file}"
    tokens = filled(tmp_path / "states", url)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE segments RENAME COLUMN used_at TO used_au")
        if theirs:
            connection.execute("CREATE TABLE theirs (x)")
        connection.commit()
    again = states(tmp_path / "states", url)
    assert best(again.cache, tokens) == 1500
    again.close()
    assert (tmp_path / "checkpoints.db.bad").exists() != theirs
    if not theirs:
        assert len(rows(url)) == 7
    assert sum("checkpoint index" in record.getMessage() for record in caplog.records) == 1


def test_an_index_that_is_damaged_while_it_is_written_is_begun_anew(tmp_path):
    file = tmp_path / "checkpoints.db"
    url = f"sqlite:///{file}"
    tokens = filled(tmp_path / "states", url)
    again = states(tmp_path / "states", url)
    assert again.writer is not None
    again.writer.close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("ALTER TABLE segments RENAME COLUMN used_at TO used_au")
        connection.commit()
    save(again.cache, context(9, 300), 250)
    assert again.writer.flush(60.0, everything=True)
    assert again.ledger is not None
    assert again.ledger.flush(), "it need not be waited for"
    assert (tmp_path / "checkpoints.db.bad").exists()
    again.close()
    third = states(tmp_path / "states", url)
    assert (best(third.cache, tokens), best(third.cache, context(9, 300))) == (1500, 250)
    third.close()
    assert rows(url).keys() == {bytes.fromhex(p.stem) for p in tmp_path.glob("states/*/??/*.safetensors")}
