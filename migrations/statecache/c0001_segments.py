"""Segments of the durable tier."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "c0001"
down_revision = None
branch_labels = ("statecache",)
depends_on = None


def upgrade() -> None:
    op.create_table(
        "segments",
        sa.Column("namespace", sa.LargeBinary(32), nullable=False),
        sa.Column("segment", sa.LargeBinary(17), nullable=False),
        sa.Column("what", sa.String(8), nullable=False),
        sa.Column("salt", sa.LargeBinary(32), nullable=False),
        sa.Column("block_key", sa.LargeBinary(16), nullable=False),
        sa.Column("parent", sa.LargeBinary(16), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.LargeBinary(), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("item", sa.Integer(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("used_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "segment", name="pk_segments"),
    )
    op.create_index("ix_segments_prefix", "segments", ["namespace", "salt", "what", "block_key", "position"])


def downgrade() -> None:
    op.drop_index("ix_segments_prefix", "segments")
    op.drop_table("segments")
