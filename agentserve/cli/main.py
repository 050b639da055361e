"""`agentserve`: one command per file. Commands import what they need when they run, so `--help` answers at once."""

from __future__ import annotations

from typing import Annotated

import typer

from agentserve.cli import cache, calibrate, chat, demo, doctor, launch, memory, migrate, serve

app = typer.Typer(
    name="agentserve",
    help="Serve a language model to agents: OpenAI Responses over WebSocket, with sessions kept as saved model state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # the lines of a paragraph are joined and wrapped to the terminal
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"agentserve {version('agentserve')}")
        except PackageNotFoundError:
            typer.echo("agentserve, run from its source tree and not installed")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("chat")(chat.chat)
app.command("launch")(launch.launch)
app.command("calibrate")(calibrate.calibrate)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.command("memory")(memory.memory)
app.command("migrate")(migrate.migrate)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
