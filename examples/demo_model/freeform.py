"""Plays requests that were worded by hand, by somebody who had not read the generator, against a live server.

    python -m examples.demo_model.freeform [--set c …] [--show]

A request counts when the model made exactly the expected calls, with arguments copied right, and its last answer contains what
the results say (or, for plain talk, it answered without a call). A tool answers only if it is called as expected; any other call
gets an error. A set that was looked at while the generator changed is spent: write a new one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from agentserve.cli.connect import AgentSocket
from agentserve.cli.private_server import private_server

SETS = Path(__file__).parent / "freeform"
MAX_ROUNDS = 5


def set_file(name: str) -> Path:
    """A set of this folder by its letter, any other file by its path."""
    ours = SETS / f"set_{name}.jsonl"
    return ours if ours.is_file() else Path(name)


def load(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def same(wanted: Any, got: Any) -> bool:
    """Equal up to case, outer spaces, a trailing slash, and spaces in general when both are arithmetic."""
    if isinstance(wanted, int | float) and isinstance(got, int | float):
        return wanted == got
    if not isinstance(wanted, str) or not isinstance(got, str):
        return wanted == got

    def plain(text: str) -> str:
        text = text.strip().rstrip("/").lower()
        return text.replace(" ", "") if not any(c.isalpha() for c in text) else text

    return plain(wanted) == plain(got)


def says(answer: str, part: str | list[str]) -> bool:
    """A list is a choice of words that mean the same."""
    choices = [part] if isinstance(part, str) else part
    return any(choice.lower() in answer.lower() for choice in choices)


def matches(expected: dict[str, Any], name: str, arguments: Any) -> bool:
    wanted = expected["arguments"]
    return (
        name == expected["name"]
        and isinstance(arguments, dict)
        and wanted.keys() == arguments.keys()
        and all(same(wanted[key], arguments[key]) for key in wanted)
    )


def play(socket: AgentSocket, request: dict[str, Any]) -> tuple[bool, str]:
    """(right, what happened in one line)."""
    open_calls, wrong, happened = list(request["calls"]), False, []
    items: list[dict[str, Any]] = [{"role": "user", "content": request["user"]}]
    previous: dict[str, str] = {}
    for _ in range(MAX_ROUNDS):
        events = socket.turn(
            {
                "input": items,
                "tools": request["tools"],
                "temperature": 0,
                "max_output_tokens": 400,
                **previous,
            }
        )
        event = list(events)[-1]
        if event["type"] != "response.completed":
            return False, " | ".join([*happened, event["type"]])
        previous, items = {"previous_response_id": event["response"]["id"]}, []
        for item in event["response"]["output"]:
            if item["type"] != "function_call":
                continue
            happened.append(f"{item['name']}({item['arguments']})")
            try:
                arguments = json.loads(item["arguments"])
            except ValueError:
                arguments = None
            hit = next((c for c in open_calls if matches(c, item["name"], arguments)), None)
            if hit is None or (not request["parallel"] and hit is not open_calls[0]):
                wrong, output = True, '{"error": "not found"}'
            else:
                open_calls.remove(hit)
                output = hit["result"]
            items.append({"type": "function_call_output", "call_id": item["call_id"], "output": output})
        if not items:
            texts = [i["content"][0]["text"] for i in event["response"]["output"] if i["type"] == "message"]
            answer = " ".join(texts)
            happened.append(answer)
            told = bool(answer.strip()) and all(says(answer, part) for part in request["answer_contains"])
            return told and not open_calls and not wrong, " | ".join(happened)
    return False, " | ".join([*happened, "no end"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", type=set_file, nargs="+", default=sorted(SETS.glob("*.jsonl")), help="letters or files")
    parser.add_argument("--show", action="store_true", help="print what went wrong")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, private_server(Path(scratch)) as server:
        server.start()
        with AgentSocket(server.target) as socket:
            for file in arguments.set:
                requests = load(file)
                right = 0
                for request in requests:
                    good, happened = play(socket, request)
                    right += good
                    if arguments.show and not good:
                        print(f"{request['user']}\n    {happened}", flush=True)
                result = {
                    "evaluation": "freeform",
                    "set": file.stem,
                    "requests": len(requests),
                    "right": right,
                }
                print(json.dumps(result | {"rate": round(right / len(requests), 3)}), flush=True)


if __name__ == "__main__":
    main()
