"""Arithmetic as people put it: in words, as small stories, and in two steps."""

from __future__ import annotations

from random import Random

from examples.demo_model import special, values
from examples.demo_model import vocabulary as v
from examples.demo_model.grammar import expand
from examples.demo_model.values import pick

# What to do with {a} and {b}, and what to do with the result of an earlier step ({r}) and {c}.
ONE = {
    "+": "add {a} and {b}|add {b} to {a}|add up {a} and {b}|sum {a} and {b}|[what's|what is|how much is] {a} plus {b}|[what's|what is] the sum of {a} and {b}|calculate {a} plus {b}|put {a} and {b} together",
    "-": "subtract {b} from {a}|take {b} [away |]from {a}|deduct {b} from {a}|[what's|what is|how much is] {a} minus {b}|calculate {a} minus {b}|what's left [of|from] {a} [after|when] [you take|taking] away {b}|[what's|what is] the difference between {a} and {b}",
    "*": "multiply {a} by {b}|multiply {a} and {b}|multiply {a} with {b}|[what's|what is|how much is] {a} times {b}|calculate {a} times {b}|[what's|what is] the product of {a} and {b}|work out {a} multiplied by {b}|take {a} times {b}",
    "/": "divide {a} by {b}|split {a} into {b} equal parts|[what's|what is|how much is] {a} divided by {b}|calculate {a} divided by {b}|share {a} between {b}|work out {a} over {b}",
}
THEN = {
    "+": "add {c}[ to {r}|]|add {c} [on top|more]|increase {r} by {c}",
    "-": "subtract {c}[ from {r}|]|take {c} away[ from {r}|]|take away {c}|deduct {c}[ from {r}|]|reduce {r} by {c}",
    "*": "multiply {r} by {c}|multiply by {c}|take {r} times {c}",
    "/": "divide {r} by {c}|divide by {c}|split {r} by {c}",
}
VERBS = {
    "add",
    "sum",
    "calculate",
    "put",
    "subtract",
    "take",
    "deduct",
    "multiply",
    "work",
    "divide",
    "split",
    "share",
    "compute",
    "evaluate",
    "solve",
}
RESULT = {"+": ("the sum",), "-": ("the difference",), "*": ("the product",), "/": ("the quotient",)}
STORIES = (
    ("*", "{b} {t}s cost {a} each, [how much is that|what do they cost together|what do I pay]"), ("*", "[I|we] [buy|need|sold] {b} {t}s at {a} [a piece|each|dollars each], [what's the total|how much is it in all]"),
    ("*", "there are {a} {t}s in each of {b} {u}s, how many [are there|is that] [in all|altogether]"), ("/", "{b} [people|friends|of us] share {a} [{t}s|euros], how much does each get"),
    ("-", "I had {a} {t}s and gave away {b}, how many are left"), ("-", "I have {a} [euros|dollars] and spend {b}, what [remains|is left]"), ("+", "I [have|found] {a} {t}s and {p} has {b}, how many do we have together"),
    ("+", "the {t} costs {a} and the {u} costs {b}, what do [both|they] cost together"), ("/", "we drove {a} km in {b} hours, how fast was that"), ("*", "I work {a} hours a week for {b} weeks, how many hours is that"),
)  # fmt: skip


def _numbers(rng: Random, op: str) -> tuple[int | float, int | float]:
    if op == "/":
        b = rng.randint(2, 40)
        return b * rng.randint(2, 120), b
    a, b = values.number(rng), values.number(rng)
    if rng.random() < 0.5:
        a, b = rng.randint(2, 400), rng.randint(2, 90)
    if op == "-" and a < b:
        a, b = b, a
    if op in "*+" and rng.random() < 0.12:
        return round(rng.uniform(0.5, 60), rng.choice((1, 2))), b
    return a, b


def one_step(rng: Random) -> tuple[str, str]:
    """(expression, request)."""
    r = rng.random()
    if r < 0.3:
        expression = special.expression(rng)
        lead = pick(rng, ("calculate {}", "what's {}", "what is {}", "how much is {}", "work out {}", "compute {}", "what does {} come to", "what do you get for {}", "evaluate {}", "solve {}", "{}"))  # fmt: skip
        return expression, lead.format(special.spoken(expression, rng))
    if r < 0.5:
        op, story = pick(rng, STORIES)
        a, b = _numbers(rng, op)
        words = {"t": pick(rng, v.THINGS), "u": pick(rng, v.THINGS), "p": values.first_name(rng)}
        first, second = (a, b) if isinstance(b, int) else (b, a)
        text = expand(story, rng, {**words, "a": first, "b": second})
        return f"{first} {op} {second}", text
    op = pick(rng, "+-**/")
    a, b = _numbers(rng, op)
    text = expand(ONE[op], rng, {"a": a, "b": b})
    return f"{a} {op} {b}", text


def two_steps(rng: Random) -> tuple[str, str, str]:
    """(first expression, second expression, request)."""
    op, then = pick(rng, "++-**/"), pick(rng, "+--*/")
    a, b = _numbers(rng, op)
    first = f"{a} {op} {b}"
    middle = special.evaluate(first)
    c = rng.randint(2, 99)
    if then == "/" and "." not in middle:
        divisors = [n for n in range(2, 60) if int(middle) % n == 0]
        c = pick(rng, divisors) if divisors else c
    it = pick(rng, ("the result", "the result", "it", "that", "the answer", *RESULT[op]))
    start = expand(ONE[op], rng, {"a": a, "b": b})
    rest = expand(THEN[then], rng, {"r": it, "c": c})
    if start.startswith(("what", "how")):
        request = start + pick(rng, ("? Then ", ", and then ", "? And then ", "? After that, ")) + rest
    else:
        joiner = pick(rng, (", then ", " and then ", ", and then ", ". Then ", ", after that ", " and ", "; then "))
        request = start + joiner + rest
        if rng.random() < 0.2:
            request = pick(rng, ("what do I get if I ", "what is it if I ", "first ", "what happens when you ")) + request
    return first, f"{middle} {then} {c}", request
