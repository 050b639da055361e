"""A conversation that is edited on the server goes on from the longest checkpoint that still holds."""

from __future__ import annotations

from typing import Any

import httpx

from agentserve.cli.private_server import PrivateServer


def test_an_edited_item_costs_only_what_comes_behind_it(server: PrivateServer) -> None:
    with httpx.Client(base_url=server.target.url, headers=server.target.headers, timeout=60) as client:
        head = [{"role": "system", "content": "You keep a ledger. " + "Every entry has a number and a name. " * 20}]
        made = client.post("/v1/conversations", json={"items": head}).json()
        body: dict[str, Any] = {"conversation": made["id"], "max_output_tokens": 8, "temperature": 0}
        asked = ["Entry one is red.", "Entry two is green.", "Entry three is blue."]
        usages = [client.post("/v1/responses", json={**body, "input": text}).json()["usage"] for text in asked]
        path = f"/v1/conversations/{made['id']}/items"
        items = client.get(f"{path}?order=asc&limit=100").json()["data"]
        (second,) = [i for i in items if i.get("role") == "user" and i["content"][0]["text"] == asked[1]]
        client.post(f"{path}/{second['id']}", json={"item": {"role": "user", "content": "Entry two is yellow."}})
        usage = client.post("/v1/responses", json={**body, "input": "Which is yellow?"}).json()["usage"]
        first_turn = usages[0]["input_tokens"]
        assert first_turn <= usage["input_tokens_details"]["cached_tokens"] < usages[1]["input_tokens"]
        (session,) = [s for s in client.get("/v1/sessions?limit=100").json()["data"] if len(s["lineage"]) == 4]
        assert session["turns"] == 4
