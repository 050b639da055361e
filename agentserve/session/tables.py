"""Tables of the sessions database. Only their shape; statements are in store.py and aliases.py.

Token ids are little-endian uint32. A response keeps only the part of its prompt that its parent's tokens do not have
(`prompt_base`, `prompt_kept`), because a session of 300 turns would otherwise hold its context 300 times. So with its
items: see shared_items.py.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("principal", String(256), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("updated_at", Float(53), nullable=False),
    Column("turns", Integer, nullable=False),
    Column("last_response", String(128)),
    Column("context_tokens", Integer, nullable=False),
    Column("reused_tokens", BigInteger, nullable=False),
    Index(None, "principal", "updated_at"),
)

responses = Table(
    "responses",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("session", ForeignKey("sessions.id", ondelete="CASCADE"), nullable=False),
    Column("principal", String(256), nullable=False),
    # No foreign key: a parent may be deleted, and its children must then be known to be incomplete.
    Column("parent", String(128), index=True),
    Column("model", String(256), nullable=False),
    Column("status", String(32), nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("completed_at", Float(53), nullable=False),
    Column("instructions", LargeBinary),  # bytes, because PostgreSQL text cannot hold U+0000
    Column("tools", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("prompt_base", String(128), index=True),
    Column("prompt_kept", Integer, nullable=False),
    Column("prompt_ids", LargeBinary, nullable=False),
    Column("generated_ids", LargeBinary, nullable=False),
    # Whose context this one was seen to go on from, where the client resent all of it and named no parent.
    Column("follows", String(128)),
    Column("context_items", Integer, nullable=False, server_default="0"),
    Column("stream", LargeBinary),  # how its events were cut: see replay.py
    Column("conversation", String(128)),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    # Whose input this one's begins with, and how many of its items: see shared_items.py.
    Column("input_base", String(128), index=True),
    Column("input_kept", Integer, nullable=False, server_default="0"),
    # Those of a session with the most items come first; and a principal's bytes are added up without reading a row.
    Index(None, "session", "context_items", "completed_at"),
    Index(None, "principal", "bytes"),
)

items = Table(
    "items",
    metadata,
    Column("response", ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
    Column("output", Integer, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("type", String(64), nullable=False),
    Column("body", LargeBinary, nullable=False),
)

idempotency = Table(
    "idempotency",
    metadata,
    Column("principal", String(256), primary_key=True),
    Column("key", String(64), primary_key=True),  # SHA-256 of what the client sent
    Column("response", ForeignKey("responses.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("digest", LargeBinary),
)

conversations = Table(
    "conversations",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("principal", String(256), nullable=False, index=True),
    Column("created_at", Float(53), nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Column("last_response", String(128)),
    # version counts edits; `told` is the one that last_response and those before it say, −1 for none.
    Column("version", BigInteger, nullable=False),
    Column("told", BigInteger, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation", ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True),
    Column("id", String(128), primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index(None, "conversation", "position"),
)

background = Table(
    "background",
    metadata,
    Column("id", String(128), primary_key=True),
    Column("principal", String(256), nullable=False, index=True),
    Column("status", String(32), nullable=False, index=True),
    Column("created_at", Float(53), nullable=False),
    Column("body", LargeBinary, nullable=False),
    # Who runs it, of the servers that share this database, and when that one was last heard of.
    Column("server", String(64), nullable=False, server_default=""),
    Column("seen_at", Float(53), nullable=False, server_default="0"),
)

aliases = Table(
    "aliases",
    metadata,
    Column("key", LargeBinary(16), primary_key=True),
    Column("context", LargeBinary(16), primary_key=True),
    Column("ids", LargeBinary, nullable=False),
    Column("lead", Text, nullable=False),
    Column("trail", Text, nullable=False),
    Column("claim", LargeBinary, nullable=False),
    Column("created_at", Float(53), nullable=False, index=True),
    # What was said goes with the response that said it.
    Column("response", ForeignKey("responses.id", ondelete="CASCADE"), nullable=False, index=True),
)
