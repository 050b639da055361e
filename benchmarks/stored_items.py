"""What the sessions database takes for a chat whose client resends its whole context, by each API: rows, bytes, the file.

python -m benchmarks.stored_items [--turns 50] [--record]
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import tempfile
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common import report
from benchmarks.load.server import lab_server

APIS = ("chat/completions", "messages", "responses")
SYSTEM = "You are a careful agent. " * 40
TEXT = "The lamp in the old house by the river is green and costs forty-two coins. " * 6
ANSWER_TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    options = parser.parse_args()
    turns: int = options.turns
    figures: dict[str, Any] = {}
    for api in APIS:
        with tempfile.TemporaryDirectory() as folder, lab_server(Path(folder), "instant") as server:
            chat(server.port, api, turns)
            figures[api] = taken(Path(folder) / "sessions.db")
    report("stored_items", "instant", {"turns": turns}, figures, options.record)


def chat(port: int, api: str, turns: int) -> None:
    context: list[Any] = [{"role": "system", "content": SYSTEM}] if api == APIS[0] else []
    for n in range(turns):
        context.append({"role": "user", "content": f"{n}: {TEXT}"})
        body: dict[str, Any] = {"model": "demo", ("input" if api == APIS[2] else "messages"): context}
        if api == APIS[0]:
            said = ask(port, api, body | {"max_tokens": ANSWER_TOKENS})["choices"][0]["message"]
            kept = {name: said[name] for name in ("role", "reasoning_content") if said.get(name) is not None}
            context.append({**kept, "content": said.get("content") or ""})
        elif api == APIS[1]:
            said = ask(port, api, body | {"max_tokens": ANSWER_TOKENS, "system": SYSTEM})
            context.append({"role": "assistant", "content": said["content"] or "…"})
        else:
            context += ask(port, api, body | {"max_output_tokens": ANSWER_TOKENS, "instructions": SYSTEM})["output"]


def ask(port: int, api: str, body: dict[str, Any]) -> Any:
    url, head = f"http://127.0.0.1:{port}/v1/{api}", {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head), timeout=60) as answer:
        return json.load(answer)


def taken(file: Path) -> dict[str, int]:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        rows, size = connection.execute("SELECT count(*), sum(length(body)) FROM items").fetchone()
    return {"item_rows": rows, "item_bytes": size, "file_bytes": file.stat().st_size}


if __name__ == "__main__":
    main()
