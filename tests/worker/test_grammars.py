"""Grammars in the worker: masks of a real tokenizer, and turns that wait for theirs."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentserve.text.tokenizer import Tokenizer
from agentserve.worker.grammars import COMPILE_S, GrammarMask, GrammarRefused, Grammars
from agentserve.worker.messages import TurnFailed, TurnFinished
from engine.errors import MaskFailed
from tests.worker.harness import Harness

DEMO_MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"
END = 2039
PROMPT = list(range(14, 60))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture
def grammars(tokenizer: Tokenizer) -> Any:
    made = Grammars(lambda: tokenizer, 2048)
    yield made
    made.close()


def allowed(mask: GrammarMask) -> set[int]:
    bits = np.unpackbits(mask.words().view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:2048]).tolist())


def test_a_mask_follows_its_grammar_to_the_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars.compile('start: "yes" | "no"', [END]).result()
    for token in tokenizer.encode("yes").tolist():
        assert token in allowed(mask)
        assert END not in allowed(mask)
        assert all(tokenizer.token_bytes(t)[:1] in (b"y", b"n", b"e", b"s", b"o") for t in allowed(mask))
        mask.accept(token)
    assert allowed(mask) == {END}


def test_text_cannot_spell_a_control_token(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars.compile("start: /(?s:.*)/", [END]).result()
    assert allowed(mask) & set(tokenizer.control_ids) == {END}


def test_one_grammar_serves_many_answers_at_their_own_places(grammars: Grammars, tokenizer: Tokenizer) -> None:
    one, other = (grammars.compile('start: "ab"', [END]).result() for _ in range(2))
    for token in tokenizer.encode("ab").tolist():
        one.accept(token)
    assert allowed(one) == {END}
    assert END not in allowed(other)


def test_what_cannot_be_compiled_is_refused_with_the_reason(grammars: Grammars) -> None:
    with pytest.raises(GrammarRefused, match="unknown name"):
        grammars.compile("start: nothing", [END]).result()


@pytest.mark.parametrize("grammar", ["start: start", "start: a\na: b\nb: a"])
def test_rules_that_only_lead_back_to_themselves_are_refused(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarRefused, match=r"^no answer can have this form$"):
        grammars.compile(grammar, [END]).result()


def test_a_token_outside_the_grammar_ends_in_an_error(grammars: Grammars, tokenizer: Tokenizer) -> None:
    mask = grammars.compile('start: "a"', [END]).result()
    mask.accept(int(tokenizer.encode("z")[0]))
    with pytest.raises(MaskFailed):
        mask.words()


class Held:
    """Grammars whose compilation ends when the test says so."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def compile(self, grammar: str, ends: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def held() -> tuple[Harness, Held]:
    h, grammars = Harness(), Held()
    h.loop._grammars = grammars  # type: ignore[assignment]
    return h, grammars


def test_others_run_while_a_grammar_compiles_and_then_its_turn_begins(held: tuple[Harness, Held]) -> None:
    h, grammars = held
    waiting = h.turn(PROMPT, grammar="g")
    other = h.turn(PROMPT)
    h.loop.poll()
    h.run()
    assert isinstance(h.end(other), TurnFinished)
    assert h.answer(waiting) == []
    grammars.futures[0].set_result(None)
    h.loop.poll()
    h.run()
    assert isinstance(h.end(waiting), TurnFinished)
    assert h.loop.elsewhere == 0
    h.assert_nothing_is_held()


@pytest.mark.parametrize("begun", [True, False], ids=["compiling", "waiting to be compiled"])
def test_a_turn_is_cancelled_while_its_grammar_compiles(held: tuple[Harness, Held], begun: bool) -> None:
    h, grammars = held
    turn = h.turn(PROMPT, grammar="g")
    future = grammars.futures[0]
    if begun:
        future.set_running_or_notify_cancel()
    h.loop.cancel(turn)
    end = h.end(turn)
    assert isinstance(end, TurnFinished)
    assert end.reason == "cancelled"
    assert future.cancelled() is not begun
    if begun:
        future.set_result(None)
    h.loop.poll()
    h.run()
    h.assert_nothing_is_held()


@pytest.mark.parametrize(("error", "code"), [(GrammarRefused("too big"), "invalid_value"), (OSError(), "server_error")])
def test_a_grammar_that_fails_fails_its_turn(held: tuple[Harness, Held], error: Exception, code: str) -> None:
    h, grammars = held
    turn = h.turn(PROMPT, grammar="g")
    grammars.futures[0].set_exception(error)
    h.loop.poll()
    end = h.end(turn)
    assert isinstance(end, TurnFailed)
    assert end.code == code
    h.assert_nothing_is_held()


def test_compiling_has_a_limit_and_deadlines_hold_meanwhile(held: tuple[Harness, Held]) -> None:
    h, _ = held
    slow = h.turn(PROMPT, grammar="g")
    late = h.turn(PROMPT, grammar="g", deadline_s=1.0)
    h.clock_s += 1.5
    h.loop.poll()
    end = h.end(late)
    assert isinstance(end, TurnFailed)
    assert end.code == "deadline_exceeded"
    assert h.loop.elsewhere == 1
    h.clock_s += COMPILE_S
    h.loop.poll()
    end = h.end(slow)
    assert isinstance(end, TurnFailed)
    assert (end.code, "smaller" in end.message) == ("invalid_value", True)
    h.assert_nothing_is_held()
