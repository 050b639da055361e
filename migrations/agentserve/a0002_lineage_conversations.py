"""Lineage of resent contexts, the shape of each stream, sizes for quotas, and conversations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a0002"
down_revision = "a0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("responses") as table:
        table.add_column(sa.Column("follows", sa.String(128)))
        table.add_column(sa.Column("context_items", sa.Integer(), nullable=False, server_default="0"))
        table.add_column(sa.Column("stream", sa.LargeBinary()))
        table.add_column(sa.Column("conversation", sa.String(128)))
        table.add_column(sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"))
        table.create_index("ix_responses_principal", ["principal"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("principal", sa.String(256), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("metadata", sa.LargeBinary(), nullable=False),
        sa.Column("last_response", sa.String(128)),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("told", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_conversations"),
    )
    op.create_index("ix_conversations_principal", "conversations", ["principal"])
    op.create_table(
        "conversation_items",
        sa.Column("conversation", sa.String(128), nullable=False),
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("conversation", "id", name="pk_conversation_items"),
        sa.ForeignKeyConstraint(
            ["conversation"], ["conversations.id"], name="fk_conversation_items_conversation", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_conversation_items_conversation_position", "conversation_items", ["conversation", "position"])


def downgrade() -> None:
    op.drop_table("conversation_items")
    op.drop_table("conversations")
    with op.batch_alter_table("responses") as table:
        table.drop_index("ix_responses_principal")
        for column in ("bytes", "conversation", "stream", "context_items", "follows"):
            table.drop_column(column)
