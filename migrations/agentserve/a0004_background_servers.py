"""Which server runs a background response, so that another one that shares the database leaves it alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a0004"
down_revision = "a0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("background") as table:
        table.add_column(sa.Column("server", sa.String(64), nullable=False, server_default=""))
        table.add_column(sa.Column("seen_at", sa.Float(53), nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("background") as table:
        table.drop_column("seen_at")
        table.drop_column("server")
