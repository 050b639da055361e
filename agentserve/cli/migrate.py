"""`agentserve migrate`: bring the databases to this version's schema."""

from __future__ import annotations

from agentserve.cli import options


def migrate(
    config: options.ConfigFile = None, state_dir: options.StateDir = None, database_url: options.DatabaseUrl = None
) -> None:
    """Bring the databases to the newest schema.

    `serve` does this at start unless store.migrate is false. Safe to run twice; never deletes data.
    """
    chosen = options.settings(config, {"state_dir": state_dir, "store.url": database_url})
    import typer
    from sqlalchemy.exc import SQLAlchemyError

    from agentserve.app import migrate as bring_up_to_date
    from agentserve.errors import ConfigError

    try:
        revision = bring_up_to_date(chosen)
    except ConfigError as error:
        options.fail(str(error), status=2)
    except (SQLAlchemyError, ValueError) as error:
        options.fail(f"the database could not be migrated: {error}")
    typer.echo(f"schema is at revision {revision}")
