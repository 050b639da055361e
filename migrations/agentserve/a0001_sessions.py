"""Sessions, responses, items, idempotency keys, aliases."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a0001"
down_revision = None
branch_labels = ("agentserve",)
depends_on = None


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("principal", sa.String(256), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("updated_at", sa.Float(53), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False),
        sa.Column("last_response", sa.String(128)),
        sa.Column("context_tokens", sa.Integer(), nullable=False),
        sa.Column("reused_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_principal_updated_at", "sessions", ["principal", "updated_at"])
    op.create_table(
        "responses",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("session", sa.String(128), nullable=False),
        sa.Column("principal", sa.String(256), nullable=False),
        sa.Column("parent", sa.String(128)),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("completed_at", sa.Float(53), nullable=False),
        sa.Column("instructions", sa.LargeBinary()),
        sa.Column("tools", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_base", sa.String(128)),
        sa.Column("prompt_kept", sa.Integer(), nullable=False),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False),
        sa.Column("generated_ids", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_responses"),
        sa.ForeignKeyConstraint(["session"], ["sessions.id"], name="fk_responses_session", ondelete="CASCADE"),
    )
    op.create_index("ix_responses_session", "responses", ["session"])
    op.create_index("ix_responses_parent", "responses", ["parent"])
    op.create_index("ix_responses_prompt_base", "responses", ["prompt_base"])
    op.create_table(
        "items",
        sa.Column("response", sa.String(128), nullable=False),
        sa.Column("output", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("response", "output", "position", name="pk_items"),
        sa.ForeignKeyConstraint(["response"], ["responses.id"], name="fk_items_response", ondelete="CASCADE"),
    )
    op.create_table(
        "idempotency",
        sa.Column("principal", sa.String(256), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("response", sa.String(128), nullable=False),
        sa.Column("digest", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("principal", "key", name="pk_idempotency"),
        sa.ForeignKeyConstraint(["response"], ["responses.id"], name="fk_idempotency_response", ondelete="CASCADE"),
    )
    op.create_index("ix_idempotency_response", "idempotency", ["response"])
    op.create_table(
        "aliases",
        sa.Column("key", sa.LargeBinary(16), nullable=False),
        sa.Column("context", sa.LargeBinary(16), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.Column("lead", sa.Text(), nullable=False),
        sa.Column("trail", sa.Text(), nullable=False),
        sa.Column("claim", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("response", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("key", "context", name="pk_aliases"),
        sa.ForeignKeyConstraint(["response"], ["responses.id"], name="fk_aliases_response", ondelete="CASCADE"),
    )
    op.create_index("ix_aliases_response", "aliases", ["response"])
    op.create_index("ix_aliases_created_at", "aliases", ["created_at"])


def downgrade() -> None:
    for table in ("aliases", "idempotency", "items", "responses", "sessions"):
        op.drop_table(table)
