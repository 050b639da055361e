"""The table of the durable index. Only its shape; statements are in queries.py.

One row per segment on disk: what its header says, so that a start needs no header, and so that any part of it can be written
again from the files. And one row per session and state that it placed or used, which only the database knows: losing it costs
lists and pins, no state. used_at, noted_at: seconds since the epoch.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, LargeBinary, MetaData, String, Table

metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s"})

segments = Table(
    "segments",
    metadata,
    Column("namespace", LargeBinary(32), primary_key=True),
    Column("segment", LargeBinary(17), primary_key=True),
    Column("what", String(8), nullable=False),
    Column("salt", LargeBinary(32), nullable=False),
    Column("block_key", LargeBinary(16), nullable=False),
    Column("parent", LargeBinary(16), nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("position", BigInteger, nullable=False),
    Column("tokens", LargeBinary, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("item", Integer, nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    Column("hits", Integer, nullable=False),
    Column("used_at", Float(53), nullable=False),
    Index("ix_segments_prefix", "namespace", "salt", "what", "block_key", "position"),
)

members = Table(
    "members",
    metadata,
    Column("namespace", LargeBinary(32), primary_key=True),
    Column("segment", LargeBinary(17), primary_key=True),
    Column("session", String, primary_key=True),
    Column("pinned", Boolean, nullable=False),
    Column("noted_at", Float(53), nullable=False),
    Index("ix_members_session", "namespace", "session"),
)
