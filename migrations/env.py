"""Runs alembic for one branch: through a connection that the caller brings, else through `-x url=…`.

Each branch keeps its revision in a table of its own, so that two branches may live in one database or in two.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from agentserve.session.database import SCHEMAS


def _argument(name: str, default: str) -> str:
    return context.config.attributes.get(name) or context.get_x_argument(as_dictionary=True).get(name, default)


def _run(connection: Connection) -> None:
    branch = _argument("branch", "agentserve")
    context.configure(
        connection=connection,
        target_metadata=SCHEMAS.get(branch),
        version_table=f"alembic_{branch}",
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    _run(given)
else:
    engine = create_engine(_argument("url", "sqlite:///sessions.db"))
    with engine.begin() as connection:
        _run(connection)
    engine.dispose()
