"""Strict output on the demo model: random schemas, random sampling; every answer that completes must fit its schema.

    python -m benchmarks.strict_output [--schemas 1000] [--record]

A real server, several turns at a time. Nothing is timed: an answer that does not complete within its limit counts as cut.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator, FormatChecker

from agentserve.cli.private_server import PrivateServer, private_server
from benchmarks.common import report
from benchmarks.random_schemas import FORMATS, Schema, random_schema

LANES = 6
MAX_TOKENS = 600
FORMAT_CHECKER = FormatChecker(formats=FORMATS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: of the response, or invalid, or refused. detail: why, for the last two."""

    seed: int
    status: str
    tokens: int
    detail: str = ""


def problem(text: str, schema: Schema) -> str:
    """Why this text does not fit, "" if it does."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(iter(Draft202012Validator(schema, format_checker=FORMAT_CHECKER).iter_errors(value)), None)
    return "" if found is None else found.message


def ask(client: httpx.Client, seed: int, schema: Schema) -> dict[str, Any]:
    body = {
        "input": f"Make up a record. Number {seed}.",
        "temperature": 1.0,
        "seed": seed,
        "max_output_tokens": MAX_TOKENS,
        "reasoning": {"effort": "none"},
        "store": False,
        "text": {"format": {"type": "json_schema", "name": "record", "schema": schema, "strict": True}},
    }
    return client.post("/v1/responses", json=body).json()


def run_one(client: httpx.Client, seed: int) -> Outcome:
    """One schema, one answer."""
    schema = random_schema(seed)
    body = ask(client, seed, schema)
    if "error" in body and body.get("status") is None:
        return Outcome(seed, "refused", 0, f"{body['error']['param']}: {body['error']['message']}")
    tokens = body["usage"]["output_tokens"]
    if body["status"] != "completed":
        return Outcome(seed, body["status"], tokens)
    why = problem("".join(part["text"] for item in body["output"] for part in item["content"]), schema)
    return Outcome(seed, "invalid" if why else "completed", tokens, why)


def run_many(server: PrivateServer, seeds: range, lanes: int = LANES) -> list[Outcome]:
    headers = {"authorization": f"Bearer {server.target.token}"}
    with (
        httpx.Client(base_url=server.target.url, headers=headers, timeout=600) as client,
        ThreadPoolExecutor(lanes) as pool,
    ):
        return list(pool.map(lambda seed: run_one(client, seed), seeds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--record", action="store_true", help="append to benchmarks/results/")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.schemas)
    with tempfile.TemporaryDirectory() as directory, private_server(Path(directory), flags=("--threads", "1")) as server:
        server.start()
        outcomes = run_many(server, seeds)
    for outcome in outcomes:
        if outcome.status in ("invalid", "refused", "failed"):
            print(f"seed {outcome.seed}: {outcome.status}: {outcome.detail}", file=sys.stderr)
    counts = Counter(outcome.status for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    figures = {
        "completed_and_valid": counts["completed"],
        "invalid": counts["invalid"],
        "refused": counts["refused"],
        "cut_by_max_output_tokens": counts["incomplete"],
        "failed": counts["failed"],
        "output_tokens": tokens,
    }
    workload = {"schemas": len(outcomes), "first_seed": arguments.first, "temperature": 1.0, "lanes": LANES}
    report("strict_output", "demo", workload, figures, arguments.record)
    sys.exit(1 if counts["invalid"] or counts["failed"] or counts["refused"] else 0)


if __name__ == "__main__":
    main()
