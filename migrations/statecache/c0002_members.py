"""Which sessions use which checkpoints, and what they pinned."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "c0002"
down_revision = "c0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "members",
        sa.Column("namespace", sa.LargeBinary(32), nullable=False),
        sa.Column("segment", sa.LargeBinary(17), nullable=False),
        sa.Column("session", sa.String(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("noted_at", sa.Float(53), nullable=False),
        sa.PrimaryKeyConstraint("namespace", "segment", "session", name="pk_members"),
    )
    op.create_index("ix_members_session", "members", ["namespace", "session"])


def downgrade() -> None:
    op.drop_index("ix_members_session", "members")
    op.drop_table("members")
