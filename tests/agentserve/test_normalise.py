"""What normalisers do to a context: what their patterns name and nothing else, once for ever, told with what it saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from websockets.sync.client import connect

from agentserve.config import Config, TurnConfig, load
from agentserve.errors import ConfigError
from agentserve.interfaces import Rendered, RenderRequest
from agentserve.normalise import LONGEST_TEXT, ORDER, Normalisers, in_order, without_headers, without_times
from agentserve.protocol.items import CustomTool, FunctionTool, InputText, Item, Message, Tool
from agentserve.protocol.responses import Normaliser
from agentserve.session.divergence import Contexts
from tests.agentserve.test_websocket import AUTH, send, until_terminal
from tests.agentserve.text.models import FAMILIES
from tests.agentserve.text.models import model as text_of
from tests.fakes.server import config_for_tests, running
from tests.fakes.text import MARKERS
from tests.fakes.worker import answer

HEADERS = TurnConfig().nonce_headers
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{}; cc_entrypoint=cli; cch={};"
ALL = Normalisers(ORDER, HEADERS)

clock = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
exact = st.builds("{}:{:02}{}".format, clock, st.integers(0, 59), st.sampled_from(["", ".1", ".123456"]))
numbers = {"year": st.integers(1970, 2999), "month": st.integers(1, 12), "day": st.integers(1, 31)}
months = st.sampled_from(["Jan", "Feb", "March", "Apr", "May", "June", "Jul", "August", "Sept", "Oct", "Nov", "December"])


def stamped(date: st.SearchStrategy[str], *behind: str) -> st.SearchStrategy[tuple[str, str]]:
    """(date with its time, date alone). behind: how the time is written."""
    return st.builds(lambda d, form, t: (d + form.format(t), d), date, st.sampled_from(behind), exact)


iso = st.builds("{year}-{month:02}-{day:02}".format, **numbers)
words = st.builds("{} {:02} {}".format, months, numbers["day"], numbers["year"])
turned = st.builds("{:02} {} {}".format, numbers["day"], months, numbers["year"])
local = st.builds("{month}/{day}/{year}".format, **numbers)
STAMPS = st.one_of(
    stamped(iso, "T{}", "T{}Z", " {}", " {} UTC", "T{}+01:00", " {}-0530"),
    stamped(words, " {}", " {} GMT+0100 (Central European Time)", ", {}", " at {} PM"),
    stamped(turned, " {} GMT"),
    stamped(local, ", {}", ", {} PM"),
    st.builds(lambda m, d, t, y: (f"{m} {d:2} {t} {y}", f"{m} {d:2} {y}"), months, numbers["day"], exact, numbers["year"]),
)
PLAIN = st.text(st.characters(exclude_categories=("Cs", "Nd", "L")), max_size=30).map(lambda t: f"; {t}; ")
"""Letters and digits are what stamps are made of: text between them has neither."""


@given(parts=st.lists(st.tuples(PLAIN, STAMPS), max_size=4), end=PLAIN)
def test_times_go_and_everything_else_stays(parts: list[tuple[str, tuple[str, str]]], end: str) -> None:
    sent = "".join(plain + stamp for plain, (stamp, _) in parts) + end
    assert without_times(sent) == "".join(plain + date for plain, (_, date) in parts) + end


@pytest.mark.parametrize(
    "text",
    [
        "at 13:04:05",
        "2026-01-02",
        "v2026-01-02T13:04:05",
        "log-2026-01-02 13:04:05",
        "2026-01-02 13:04:055",
        "2026-01-02  13:04:05",
        "Jan 2026 13:04:05",
        "2026-01-02 (13:04:05)",
        "12026-01-02 13:04",
        "ratio 1/2/2026",
    ],
)
def test_what_is_no_date_with_a_time_stays(text: str) -> None:
    assert without_times(text) == text


@given(
    st.lists(
        st.sampled_from(["2026-01-02", "T13:04:05", " 13:04", "Jan  2", " 2026", "Z", " UTC", ",", " at ", "x", "1/2/2026"])
    )
)
@example(["2026-01-02", "T13:04:05", " 13:04"])
def test_folding_twice_is_folding_once(pieces: list[str]) -> None:
    once = without_times("".join(pieces))
    assert without_times(once) == once
    rest = iter("".join(pieces))
    assert all(letter in rest for letter in once), "nothing was added or moved"


@given(
    nonces=st.lists(st.from_regex(r"[a-f0-9]{0,9}", fullmatch=True), min_size=1, max_size=3),
    gap=st.sampled_from(["\n", "\n\n", "\r\n"]),
    rest=st.text(max_size=60),
)
def test_headers_go_and_everything_behind_stays(nonces: list[str], gap: str, rest: str) -> None:
    rest = "Y" + rest
    head = "".join(BILLING.format(n, n) + gap for n in nonces)
    assert without_headers(head + rest, HEADERS) == rest
    assert without_headers(head.upper() + rest, HEADERS) == rest
    assert without_headers(rest + gap + head, HEADERS) == rest + gap + head, "only at the beginning"
    assert without_headers(head + rest, ("other",)) == head + rest
    assert without_headers(head + rest, ()) == head + rest
    assert without_headers(head.strip(), HEADERS) == ""


tools = st.lists(
    st.one_of(
        st.builds(FunctionTool, name=st.sampled_from("abc"), description=st.none() | st.sampled_from(["x", "y"])),
        st.builds(CustomTool, name=st.sampled_from("abc"), description=st.none() | st.sampled_from(["x", "y"])),
    ),
    max_size=6,
)


@given(declared=tools, data=st.data())
def test_tools_in_any_order_come_in_one(declared: list[Tool], data: st.DataObject) -> None:
    ordered = in_order(tuple(declared))
    shuffled = tuple(data.draw(st.permutations(declared)))
    assert in_order(shuffled) == ordered == in_order(ordered)
    assert sorted(map(repr, ordered)) == sorted(map(repr, declared)), "each stays as it is"
    assert [tool.name for tool in ordered] == sorted(tool.name for tool in declared)


# ── contexts ─────────────────────────────────────────────────────────────────────────────────────────────────────

texts = st.lists(
    st.one_of(PLAIN, STAMPS.map(lambda s: s[0]), st.just(BILLING.format("a1", "b2") + "\n"), st.text(max_size=9))
).map("".join)
items = st.lists(
    st.builds(
        lambda role, parts: Message(role=role, content=tuple(map(InputText, parts))),
        st.sampled_from(["system", "developer", "user"]),
        st.lists(texts, min_size=1, max_size=2),
    ),
    max_size=4,
).map(tuple)
requests = st.builds(RenderRequest, instructions=st.none() | texts, tools=tools.map(tuple), items=items)
chosen = st.lists(st.sampled_from(ORDER), unique=True).map(tuple)


@given(request=requests, names=chosen)
def test_a_context_is_normalised_once_for_ever(request: RenderRequest, names: tuple[Normaliser, ...]) -> None:
    normalisers = Normalisers(names, HEADERS)
    shown, changed = normalisers.apply(request)
    assert normalisers.apply(shown) == (shown, ())
    assert set(changed) <= set(names)
    assert (shown == request) == (not changed)
    assert normalisers.head(request.instructions, request.items) == (shown.instructions, shown.items)
    assert len(shown.items) == len(request.items)
    spoken = next((i for i, item in enumerate(request.items) if item.role == "user"), len(request.items))  # type: ignore[union-attr]
    assert shown.items[spoken:] == request.items[spoken:], "what was said stays"


def test_each_is_known_everywhere() -> None:
    assert set(ORDER) == set(get_args(Normaliser))


def test_what_is_too_long_stays() -> None:
    text = "2026-01-02 13:04 " + "x" * LONGEST_TEXT
    assert ALL.head(text, ())[0] == text
    assert ALL.head(text[:LONGEST_TEXT], ())[0] == "2026-01-02" + text[16:LONGEST_TEXT]


def prompt_of(nonce: str, time: str, tools: tuple[Tool, ...]) -> RenderRequest:
    """What a client sends in each of its turns: the same, but for what it does not mean."""
    said: tuple[Item, ...] = (
        Message(role="developer", content=(InputText(f"{BILLING.format(nonce, nonce)}\nIt is 2026-11-30 {time}."),)),
        Message(role="user", content=(InputText(f"Was it 2026-01-02T{time}?"),)),
    )
    head = f"{BILLING.format(nonce, nonce)}\n\nNow: 2026-11-30T{time}Z. Be brief."
    return RenderRequest(instructions=head, tools=tools, items=said)


PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
READ, LOOK = (FunctionTool(name=n, description=n, parameters=PATH) for n in ("read", "look"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_content_is_the_same_tokens(family: str) -> None:
    """Up to the message, which says the time and is not touched."""
    text = text_of(family)
    sent = [prompt_of("a1", "13:04:05", (READ, LOOK)), prompt_of("b22", "09:00:00", (LOOK, READ))]
    shown = [ALL.apply(one)[0] for one in sent]
    assert ALL.apply(sent[0])[1] == ORDER
    first, second = (text.render(one) for one in shown)
    raw = [text.render(one) for one in sent]
    start = first.item_starts[1]
    assert second.item_starts[1] == start
    assert np.array_equal(first.ids[:start], second.ids[:start])
    assert not np.array_equal(raw[0].ids[:start], raw[1].ids[:start])


# ── settings, requests and the report ────────────────────────────────────────────────────────────────────────────


def config(*names: Normaliser, **fields: Any) -> Config:
    return config_for_tests(turn={"normalise": names, **fields})


def test_it_is_a_setting(tmp_path: Any) -> None:
    assert load(environ={}).turn.normalise == ()
    file = tmp_path / "c.toml"
    file.write_text('[turn]\nnormalise = ["dates"]\nnonce_headers = ["x-run"]\n')
    assert load(file, environ={}).turn.normalise == ("dates",)
    environ = {"AGENTSERVE_TURN_NORMALISE": "tool_order, nonce_header"}
    assert load(file, environ=environ).turn.normalise == ("tool_order", "nonce_header")
    with pytest.raises(ConfigError, match="normalise"):
        load(environ={"AGENTSERVE_TURN_NORMALISE": "everything"})


@pytest.fixture(params=["setting", "object", "metadata"])
def asked(request: pytest.FixtureRequest) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A server, and what a request says so that two of the normalisers work."""
    names: tuple[Normaliser, ...] = ("nonce_header", "tool_order")
    options: dict[str, dict[str, Any]] = {
        "setting": {"agentserve": {"events": True}},
        "object": {"agentserve": {"events": True, "normalise": names}},
        "metadata": {"metadata": {"agentserve.events": "1", "agentserve.normalise": "nonce_header, tool_order"}},
    }
    with running(config(*names) if request.param == "setting" else config("dates")) as server:
        server.worker.scripts.append(answer("first"))
        server.worker.default = answer("next", reused=100)
        yield server, options[request.param]


def body_of(nonce: str, *names: str, text: str = "Hello " * 20) -> dict[str, Any]:
    return {
        "instructions": f"{BILLING.format(nonce, nonce)}\nBe brief. 2026-11-30 13:04",
        "tools": [{"type": "function", "name": name} for name in names],
        "input": [{"role": "user", "content": text}],
    }


def test_the_report_says_what_was_done_and_saved(asked: tuple[Any, dict[str, Any]]) -> None:
    server, options = asked
    with connect(server.ws_url, additional_headers=AUTH) as socket:
        reports, sessions = [], []
        for body in (body_of("a", "g", "f"), body_of("b", "f", "g"), body_of("b", "f", "g"), {"input": "Hello"}):
            send(socket, **body, **options)
            events = until_terminal(socket)
            reports += [e for e in events if e["type"] == "agentserve.cache.report"]
            last = events[-1]["response"]
            sessions.append(server.store.rows[last["id"]].session)
            assert last["instructions"] == body.get("instructions"), "what was sent is what is answered"
    seen = [(r.instructions, [t.name for t in r.tools]) for r in server.text.renders if r.prompt]
    assert seen[0] == seen[1] == seen[2] == ("Be brief. 2026-11-30 13:04", ["f", "g"])
    told = [r["normalised"] for r in reports]
    assert told[0] == {"names": ["nonce_header", "tool_order"], "saved_tokens": 0}
    # As sent, the second would share the header with the first up to its nonce.
    assert told[1] == {"names": ["nonce_header"], "saved_tokens": 100 - BILLING.index("{}")}
    # The third is sent as the second was, so it would have been found without.
    assert told[2]["saved_tokens"] == 0
    assert told[3] is None
    assert sessions[0] == sessions[1], "a nonce makes no new session"


def test_a_request_can_leave_it_out_and_other_names_are_refused() -> None:
    with running(config("nonce_header")) as server, httpx.Client(base_url=server.url, headers=AUTH) as client:
        off = {**body_of("a"), "agentserve": {"normalise": []}}
        assert client.post("/v1/responses", json=off).status_code == 200
        assert server.text.renders[-1].instructions == off["instructions"]
        for more, field in (
            ({"agentserve": {"normalise": ["all"]}}, "agentserve.normalise[0]"),
            ({"metadata": {"agentserve.normalise": "all"}}, "metadata.agentserve.normalise[0]"),
        ):
            refused = client.post("/v1/responses", json={**body_of("a"), **more})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)


def test_claude_codes_header_goes_in_messages_and_in_counts() -> None:
    with running(config("nonce_header")) as server, httpx.Client(base_url=server.url, headers=AUTH) as client:
        counts = []
        for nonce in ("a", "bcd"):
            system = [{"type": "text", "text": BILLING.format(nonce, nonce)}, {"type": "text", "text": "You are an agent."}]
            body = {"model": "fake", "max_tokens": 9, "system": system, "messages": [{"role": "user", "content": "x"}]}
            assert client.post("/v1/messages", json=body).status_code == 200
            counts.append(client.post("/v1/messages/count_tokens", json=body).json()["input_tokens"])
        assert [r.instructions for r in server.text.renders if r.prompt] == ["You are an agent."] * 4
        assert counts[0] == counts[1]


# ── what was saved ───────────────────────────────────────────────────────────────────────────────────────────────


def told(contexts: Contexts, text: str, as_sent: str | None, salt: bytes = b"") -> None:
    rendered = Rendered(ids(text), (), MARKERS)
    contexts.remember(RenderRequest("", (), (), salt=salt), rendered, [], None if as_sent is None else ids(as_sent))


def ids(text: str) -> np.ndarray:
    return np.array(list(map(ord, text)), np.uint32)


def saved(contexts: Contexts, text: str, as_sent: str, reused: int, salt: bytes = b"") -> int | None:
    return contexts.saved(salt, ids(text), ids(as_sent), reused)


def test_saved_is_what_the_context_as_sent_does_not_share() -> None:
    contexts = Contexts()
    assert saved(contexts, "system user", "n1 system u", 0) == 0
    assert saved(contexts, "system user", "n1 system u", 7) is None, "nothing is known of where it comes from"
    told(contexts, "system user answer", "n1 system u")
    assert saved(contexts, "system user answer more", "n2 system u", 18) == 17
    assert saved(contexts, "system user answer more", "n1 system u", 18) == 0, "it was sent alike"
    assert saved(contexts, "system user answer more", "n2 system u", 18, salt=b"other") is None
    told(contexts, "n2 system was not normalised then", None)
    assert saved(contexts, "system user answer more", "n2 system u", 18) == 8
    assert saved(contexts, "system user answer more", "n2 system u", 5) == 0, "never less than nothing"


def test_what_was_sent_counts_among_the_bytes_that_are_kept() -> None:
    contexts = Contexts(kept_bytes=8 * 90)
    told(contexts, "x" * 40, "y" * 40)
    told(contexts, "z" * 40, None)
    assert saved(contexts, "x" * 40, "y" * 40, 40) is None, "the first had to go"
    assert saved(contexts, "z" * 40, "z", 40) is not None
