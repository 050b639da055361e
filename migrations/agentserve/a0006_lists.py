"""Indexes for what is asked of every turn: nothing of it may read all responses of a session or a principal."""

from __future__ import annotations

from alembic import op

revision = "a0006"
down_revision = "a0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "ix_responses_session_context_items_completed_at", "responses", ["session", "context_items", "completed_at"]
    )
    op.create_index("ix_responses_principal_bytes", "responses", ["principal", "bytes"])
    op.drop_index("ix_responses_session", "responses")
    op.drop_index("ix_responses_principal", "responses")


def downgrade() -> None:
    op.create_index("ix_responses_session", "responses", ["session"])
    op.create_index("ix_responses_principal", "responses", ["principal"])
    op.drop_index("ix_responses_principal_bytes", "responses")
    op.drop_index("ix_responses_session_context_items_completed_at", "responses")
