"""Input items that a response shares with an earlier one are stored with that one alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "a0005"
down_revision = "a0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("responses") as table:
        table.add_column(sa.Column("input_base", sa.String(128)))
        table.add_column(sa.Column("input_kept", sa.Integer(), nullable=False, server_default="0"))
        table.create_index("ix_responses_input_base", ["input_base"])


def downgrade() -> None:
    shared = sa.text("SELECT count(*) FROM responses WHERE input_kept > 0")
    count = op.get_bind().execute(shared).scalar()
    if count:
        raise RuntimeError(f"{count} responses share items with others; an older schema cannot hold them")
    with op.batch_alter_table("responses") as table:
        table.drop_index("ix_responses_input_base")
        table.drop_column("input_kept")
        table.drop_column("input_base")
