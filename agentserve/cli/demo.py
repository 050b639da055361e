"""`agentserve demo`: a real agent session on the embedded model, from a server process of its own.

Everything that is printed comes from the server's events or from its REST API; nothing is scripted but what the user says.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentserve.cli import options

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from agentserve.cli.connect import Target, TurnFigures
    from agentserve.cli.private_server import PrivateServer
    from agentserve.cli.tools import Toolbox

FILES = {
    "notes/prices.txt": "lamp 42",
    "notes/todo.txt": "call the plumber on Friday",
    "src/app.py": "from settings import load\nload()",
    "src/settings.py": "max_retries = 5\ntimeout = 30",
}
BEFORE_RESTART = ("Which files are in notes?", "Read notes/prices.txt", "What is 42 * 17?")
AFTER_RESTART = ("Search for max_retries in src and read the file you find",)
AFTER_EDIT = ("What is 714 + 86?",)
CLEARED = "[old output cleared]"
MOST_RESPONSES = 4
"""Of one user turn: chains of calls end after this many."""
MOST_TOKENS = 400
DEADLINE_MS = 30_000
WIDTH = 100
"""Columns where the output is no terminal."""


def demo(
    model: options.Model = None,
    keep: Annotated[
        Path | None,
        typer.Option(parser=options.path, help="Keep the server's state and log in this directory.", metavar="DIR"),
    ] = None,
) -> None:
    """Run an agent session with real tools on the embedded model, CPU only, in under a minute.

    A private server starts on a free loopback port. An agent connects over WebSocket, declares four tools and executes what
    the model calls; the server is killed in the middle and the session goes on by its last response id, restored from disk;
    then the agent edits its context (old tool output cleared, thinking dropped) and sends it whole. At the end: the
    checkpoints that were placed, what each response reused, and its time to first token against the deadline.
    """
    from rich.console import Console

    from agentserve.cli.connect import Unreachable

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="agentserve-demo-") as scratch:
        root = Path(scratch)
        workspace = root / "workspace"
        for name, text in FILES.items():
            (workspace / name).parent.mkdir(parents=True, exist_ok=True)
            (workspace / name).write_text(text + "\n")
        try:
            status = _play(console, keep or root / "state", workspace, model)
        except Unreachable as error:
            options.fail(str(error))
        except OSError as error:
            options.fail(f"cannot use {error.filename or keep}: {error.strerror}")
    console.print(f"\n{time.monotonic() - began:.0f} s in all.", style="dim")
    raise typer.Exit(status)


def _play(console: Console, state_dir: Path, workspace: Path, model: Path | None) -> int:
    from agentserve.cli.connect import AgentSocket
    from agentserve.cli.private_server import private_server
    from agentserve.cli.tools import Toolbox

    flags = [] if model is None else ["--model", str(model)]
    with private_server(state_dir, flags=flags) as server:
        _start(console, server)
        name = server.target.get("/v1/models")["data"][0]["id"]
        agent = Agent(console, name, Toolbox(workspace))
        with AgentSocket(server.target) as socket:
            for text in BEFORE_RESTART:
                agent.say(socket, text)
        checkpoints = _checkpoints(server.target)
        server.kill()
        console.print(f"\n[bold yellow]⚡ server killed (SIGKILL)[/]; the session goes on after {agent.previous}")
        _start(console, server)
        with AgentSocket(server.target) as socket:
            for text in AFTER_RESTART:
                agent.say(socket, text)
            edited = agent.clear_old_output()
            console.print(
                f"\n[bold yellow]✂ context edited[/]: {edited} old tool outputs cleared, earlier thinking dropped, sent whole"
            )
            for text in AFTER_EDIT:
                agent.say(socket, text)
        _report(console, agent, checkpoints, _checkpoints(server.target))
    return agent.verdict()


def _start(console: Console, server: PrivateServer) -> None:
    began = time.monotonic()
    with console.status("starting a server …") as status:
        server.start(waiting=lambda what: status.update(f"starting a server: {what}"))
    console.print(f"server ready on {server.target.url} after {time.monotonic() - began:.1f} s", style="dim")


@dataclass
class Row:
    """One response in the last table."""

    turn: str
    figures: TurnFigures


@dataclass
class Agent:
    """A small tool-loop agent. Follows its last response by id; keeps its own copy of the context, to edit and resend it."""

    console: Console
    model: str
    toolbox: Toolbox
    previous: str | None = None
    context: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    failures: list[str] = field(default_factory=list)

    def say(self, socket: Any, text: str) -> None:
        """One user turn: responses and tool executions until the model answers without a call."""
        self.console.print(f"\n[bold cyan]user[/]  {text}")
        new: list[dict[str, Any]] = [{"role": "user", "content": text}]
        self.turns += 1
        label = str(self.turns)
        for _ in range(MOST_RESPONSES):
            response = self._respond(socket, new, label)
            if response is None:
                return
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls:
                return
            new = [self._execute(call) for call in calls]

    def clear_old_output(self) -> int:
        """What coding agents do to save context: empty all tool outputs but the newest, drop thinking, forget the chain."""
        outputs = [item for item in self.context if item["type"] == "function_call_output"]
        for item in outputs[:-1]:
            item["output"] = CLEARED
        self.context = [item for item in self.context if item["type"] != "reasoning"]
        self.previous = None
        return max(0, len(outputs) - 1)

    def verdict(self) -> int:
        """Exit status: 0 if every response completed and at least two tool calls were executed."""
        for failure in self.failures:
            self.console.print(f"failed: {failure}", style="red", markup=False)
        if self.calls < 2:
            self.console.print(f"the model made {self.calls} tool calls, at least 2 were expected", style="red")
        return 0 if not self.failures and self.calls >= 2 else 1

    def _respond(self, socket: Any, new: list[dict[str, Any]], label: str) -> dict[str, Any] | None:
        from agentserve.cli.chat import show_events
        from agentserve.cli.connect import TERMINAL, Meter, failure_of
        from agentserve.cli.tools import TOOLS

        resend = self.previous is None
        self.context += [{"type": "message", **item} if "role" in item else item for item in new]
        body: dict[str, Any] = {
            "model": self.model,
            "input": self.context if resend else new,
            "tools": TOOLS,
            "temperature": 0,
            "max_output_tokens": MOST_TOKENS,
            "prompt_cache_key": "demo",
            "agentserve": {"events": True, "ttft_deadline_ms": DEADLINE_MS},
        }
        if self.previous is not None:
            body["previous_response_id"] = self.previous
        meter, show = Meter(), show_events(self.console)
        for event in socket.turn(body):
            meter.see(event)
            show(event)
            failure = failure_of(event)
            if failure is not None:
                self.failures.append(f"turn {label}: {failure}")
            if event["type"] not in TERMINAL:
                continue
            self.rows.append(Row(label, meter.figures))
            if failure is None:
                response = event["response"]
                self.previous = response["id"]
                self.context += response["output"]
                return response
        return None

    def _execute(self, call: dict[str, Any]) -> dict[str, Any]:
        output = self.toolbox.call(call["name"], call["arguments"])
        self.calls += 1
        self.console.print(f"  → {output}", style="green", markup=False)
        return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def _checkpoints(target: Target) -> list[dict[str, Any]]:
    """Checkpoints of every session of this server, by position."""
    sessions = target.get("/v1/sessions")["data"]
    rows = [row for session in sessions for row in target.get(f"/v1/sessions/{session['id']}/checkpoints")["data"]]
    unique = {row["id"]: row for row in rows}
    return sorted(unique.values(), key=lambda row: row["position"])


def _tiers(row: dict[str, Any]) -> str:
    return " + ".join(row["tiers"])


def _report(console: Console, agent: Agent, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
    from rich.table import Table

    for title, rows in (("Checkpoints before the kill (those on disk outlived it)", before), ("Checkpoints at the end", after)):
        table = Table(title=f"{title}: {len(rows)}", title_justify="left", title_style="bold")
        for column in ("kind", "tier", "at token position", "used"):
            table.add_column(column, justify="right" if column == "used" else "left")
        for kind, tier in sorted({(row["kind"], _tiers(row)) for row in rows}):
            same = [row for row in rows if (row["kind"], _tiers(row)) == (kind, tier)]
            positions = ", ".join(str(row["position"]) for row in same)
            table.add_row(kind, tier, positions, f"{sum(row['hits'] for row in same)}×")
        console.print()
        console.print(table)
    console.print()
    console.print(responses_table(agent.rows))
    prompt = sum(row.figures.prompt_tokens for row in agent.rows)
    reused = sum(row.figures.reused_tokens for row in agent.rows)
    share = reused / prompt if prompt else 0.0
    console.print(f"{agent.calls} tool calls executed; {reused} of {prompt} prompt tokens reused ({share:.0%}).")
    console.print("The kinds of checkpoints are in docs/glossary.md, why a context parted in docs/protocol.md.", style="dim")


def responses_table(rows: Sequence[Row]) -> Table:
    """What each response reused, and its time to first token against the deadline; at most WIDTH columns wide."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"Responses (deadline of the first token: {DEADLINE_MS // 1000} s)"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("turn", "prompt", "reused", "new", "restored from", "context parted", "TTFT", "output"):
        table.add_column(column, justify="left" if column in ("restored from", "context parted") else "right")
    for row in rows:
        f = row.figures
        table.add_row(
            row.turn,
            str(f.prompt_tokens),
            str(f.reused_tokens),
            str(f.prompt_tokens - f.reused_tokens),
            f"{f.checkpoint.split(' @ ')[0]}, {f.restored_from}" if f.checkpoint else "–",
            f.divergence or "–",
            f"{f.ttft_ms} ms {f.deadline or ''}".rstrip() if f.ttft_ms is not None else f.deadline or "–",
            str(f.output_tokens),
        )
    return table
