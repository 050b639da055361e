"""Responses that run in the background, until they are stored."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a0003"
down_revision = "a0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "background",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("principal", sa.String(256), nullable=False),
        sa.Column("status", sa.String(32), nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_background"),
    )
    op.create_index("ix_background_principal", "background", ["principal"])
    op.create_index("ix_background_status", "background", ["status"])


def downgrade() -> None:
    op.drop_table("background")
