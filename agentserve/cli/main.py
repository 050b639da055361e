"""`agentserve`: one command per file. Commands import what they need when they run, so `--help` answers at once."""

from __future__ import annotations

import typer

from agentserve.cli import cache, chat, demo, doctor, migrate, serve

app = typer.Typer(
    name="agentserve",
    help="Serve a language model to agents: OpenAI Responses over WebSocket, with sessions kept as saved model state.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve")(serve.serve)
app.command("demo")(demo.demo)
app.command("chat")(chat.chat)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.command("migrate")(migrate.migrate)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
