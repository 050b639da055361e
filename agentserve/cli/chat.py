"""`agentserve chat`: talk to a running server in the terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from agentserve.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from agentserve.cli.connect import AgentSocket, Event, Target, TurnFigures
    from agentserve.cli.tools import Toolbox

HELP = "/new starts over, /quit leaves (so does Ctrl-D); Ctrl-C stops an answer."
NO_TOOLS = "It has no tools here; with --tools DIR it may read files there, and calculate."
MOST_CALLS = 8
"""Tool rounds of one user turn, so that a model which repeats itself ends."""
SHOWN_LINES = 8
"""Of one tool's output."""


def chat(
    config: options.ConfigFile = None,
    state_dir: options.StateDir = None,
    url: Annotated[
        str | None,
        typer.Option(help="Server, e.g. http://127.0.0.1:8741. Default: from the settings.", envvar="AGENTSERVE_URL"),
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="Token. Default: the local server's token file.", envvar="AGENTSERVE_TOKEN")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            parser=options.folder,
            help="Let the model list, read and search files in this directory (nothing is written) and calculate.",
            metavar="DIR",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="Instructions for the model.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token. Default: the server's.", min=0, max=2)
    ] = None,
    once: Annotated[str | None, typer.Option("--once", help="Send this one message, print the answer, leave.")] = None,
) -> None:
    """Talk to a running server: answers stream, thinking is dimmed, tool calls are executed and shown.

    After each answer a line tells how much of the context was reused and from which checkpoint, when the first token came,
    against its deadline, and how many tokens a second followed.
    """
    from rich.console import Console

    from agentserve.cli.connect import AgentSocket, Unreachable
    from agentserve.cli.tools import Toolbox

    console = Console(highlight=False)
    try:
        target = find_target(config, state_dir, url, token)
        model = target.get("/v1/models")["data"][0]["id"]
        with AgentSocket(target) as socket:
            toolbox = None if tools is None else Toolbox(tools)
            talk = Talk(console, socket, model, toolbox, system, temperature)
            if once is not None:
                raise typer.Exit(0 if talk.say(once) else 1)
            console.print(f"[bold]{model}[/] at {target.url}. {HELP}", style="dim")
            if toolbox is None:
                console.print(NO_TOOLS, style="dim")
            _converse(console, talk)
    except Unreachable as error:
        options.fail(error.advice)


def find_target(config: Path | None, state_dir: Path | None, url: str | None, token: str | None) -> Target:
    """The server that the settings describe, unless named."""
    from agentserve.cli.connect import local_target

    if url is not None and not url.startswith(("http://", "https://")):
        options.fail(f"--url must begin with http:// or https://, got '{url}'", status=2)
    try:
        _ = None if url is None else urlsplit(url).port
    except ValueError as error:  # brackets without an end, a port that is no number
        options.fail(f"--url '{url}': {error}", status=2)
    return local_target(options.settings(config, {"state_dir": state_dir}), url, token)


def _converse(console: Console, talk: Talk) -> None:
    while True:
        try:
            said = console.input("[bold cyan]you ›[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if said in ("/quit", "/exit"):
            return
        if said == "/new":
            talk.forget()
            console.print("new session", style="dim")
        elif said.startswith("/"):
            console.print(HELP, style="dim")
        elif said:
            talk.say(said)


class Talk:
    """One session. Sends only what is new and names the response that it follows."""

    def __init__(
        self,
        console: Console,
        socket: AgentSocket,
        model: str,
        toolbox: Toolbox | None,
        system: str | None,
        temperature: float | None,
    ) -> None:
        self._console = console
        self._socket = socket
        self._model = model
        self._toolbox = toolbox
        self._system = system
        self._temperature = temperature
        self._previous: str | None = None

    def forget(self) -> None:
        self._previous = None

    def say(self, text: str) -> bool:
        """One user turn, with as many responses as the model's tool calls need. False if it failed."""
        new: list[dict[str, Any]] = [{"role": "user", "content": text}]
        for _ in range(MOST_CALLS):
            response = self._respond(new)
            if response is None:
                return False
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls or self._toolbox is None:
                return True
            new = [self._execute(call) for call in calls]
        self._console.print(f"stopped after {MOST_CALLS} rounds of tool calls", style="yellow")
        return False

    def _respond(self, new: list[dict[str, Any]]) -> dict[str, Any] | None:
        from agentserve.cli.connect import TERMINAL, Meter, failure_of
        from agentserve.cli.tools import TOOLS

        body: dict[str, Any] = {"model": self._model, "input": new}
        if self._previous is not None:
            body["previous_response_id"] = self._previous
        if self._system is not None:
            body["instructions"] = self._system
        if self._temperature is not None:
            body["temperature"] = self._temperature
        if self._toolbox is not None:
            body["tools"] = TOOLS
        meter, show = Meter(), show_events(self._console)
        for event in self._interruptible(self._socket.turn(body)):
            meter.see(event)
            show(event)
            failure = failure_of(event)
            if failure is not None:
                self._console.print(f"\n{failure}", style="red", markup=False)
                if event["type"] == "response.incomplete":
                    self._previous = event["response"]["id"]  # what was said so far stays said
                return None
            if event["type"] in TERMINAL:
                self._previous = event["response"]["id"]
                self._console.print(status_line(meter.figures), style="dim", soft_wrap=True)
                return event["response"]
        return None

    def _interruptible(self, events: Iterator[Event]) -> Iterator[Event]:
        """The events; Ctrl-C cancels the response, whose end is still read. A second one is an ordinary interrupt.

        Seen at the next event, of which there is one every two seconds at least.
        """
        pressed = False

        def press(_number: int, _frame: object) -> None:
            nonlocal pressed
            if pressed:
                raise KeyboardInterrupt
            pressed = True

        before = signal.signal(signal.SIGINT, press)
        told = False
        try:
            for event in events:
                if pressed and not told:
                    self._socket.cancel()
                    told = True
                yield event
        finally:
            signal.signal(signal.SIGINT, before)

    def _execute(self, call: dict[str, Any]) -> dict[str, Any]:
        assert self._toolbox is not None
        output = self._toolbox.call(call["name"], call["arguments"])
        self._console.print(f"  → {clipped(output)}", style="green", markup=False)
        return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def clipped(output: str) -> str:
    """As much of a tool's output as a reader wants to see; the model gets all of it."""
    lines = output.splitlines()
    if len(lines) <= SHOWN_LINES:
        return output
    return "\n".join([*lines[:SHOWN_LINES], f"… {len(lines) - SHOWN_LINES} more lines"])


def show_events(console: Console) -> Callable[[Event], None]:
    """A printer of one response's stream: thinking dimmed, text plain, calls on a line of their own."""
    open_kind = ""

    def change(kind: str) -> None:
        nonlocal open_kind
        if open_kind and open_kind != kind:
            console.print()
        open_kind = kind

    def show(event: Event) -> None:
        kind = event["type"]
        if kind == "response.reasoning_text.delta":
            change("thinking")
            console.print(event["delta"], style="dim italic", end="", markup=False)
        elif kind == "response.output_text.delta":
            change("text")
            console.print(event["delta"], end="", markup=False)
        elif kind == "response.output_item.done" and event["item"]["type"] == "function_call":
            if open_kind == "call":
                console.print()
            change("call")
            item = event["item"]
            console.print(f"  {item['name']}({item['arguments']})", style="magenta", end="", markup=False)
        elif kind.startswith("response.") and kind.rpartition(".")[2] in ("completed", "incomplete", "failed"):
            change("end")

    return show


def status_line(figures: TurnFigures) -> str:
    """Reuse, time to first token against the deadline, and speed, in one line that fits 80 columns."""
    parts = [f"reused {figures.reused_tokens}/{figures.prompt_tokens} tokens"]
    if figures.checkpoint:
        parts[0] += f" ({figures.checkpoint}, {figures.restored_from})"
    if figures.ttft_ms is not None:
        deadline = f" ({figures.deadline_ms / 1000:g} s: {figures.deadline})" if figures.deadline_ms else ""
        parts.append(f"first token {figures.ttft_ms} ms{deadline}")
    decode_s = figures.seconds - (figures.ttft_ms or 0) / 1000
    if figures.output_tokens > 1 and decode_s > 0:
        parts.append(f"{(figures.output_tokens - 1) / decode_s:.0f}/s")
    return " · ".join(parts)
