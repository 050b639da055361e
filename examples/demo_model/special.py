"""Makers that need more than one random draw: expressions, listings, file contents, shell output."""

from __future__ import annotations

from random import Random

from examples.demo_model import values
from examples.demo_model.values import pick

SPOKEN = {
    "+": ("plus", "and"),
    "-": ("minus", "less"),
    "*": ("times", "multiplied by"),
    "/": ("divided by", "over"),
}


def expression(rng: Random) -> str:
    """An arithmetic expression with values that evaluate() can compute."""
    a, b, c = values.number(rng), values.number(rng), rng.randint(2, 30)
    op = pick(rng, "+-*/+*")
    r = rng.random()
    if r < 0.6:
        return f"{a} {op} {b}"
    if r < 0.7:
        return f"{a} {op} {b} {pick(rng, '+-*')} {c}"
    if r < 0.78:
        return f"({a} {pick(rng, '+-')} {b}) {pick(rng, '*/')} {c}"
    if r < 0.84:
        return f"{a} + {b} + {c}"
    if r < 0.92:
        return f"{a} * {rng.randint(1, 99)} / 100"
    return f"{a / 10} {op} {b}"


def evaluate(text: str) -> str:
    """The value of an expression made by expression(), as a calculator would print it."""
    tokens = text.replace("(", " ( ").replace(")", " ) ").split()

    def factor(at: int) -> tuple[float, int]:
        if tokens[at] == "(":
            value, at = total(at + 1)
            return value, at + 1
        return float(tokens[at]), at + 1

    def term(at: int) -> tuple[float, int]:
        value, at = factor(at)
        while at < len(tokens) and tokens[at] in "*/":
            other, after = factor(at + 1)
            value = value * other if tokens[at] == "*" else value / other
            at = after
        return value, at

    def total(at: int) -> tuple[float, int]:
        value, at = term(at)
        while at < len(tokens) and tokens[at] in "+-":
            other, after = term(at + 1)
            value = value + other if tokens[at] == "+" else value - other
            at = after
        return value, at

    value = round(total(0)[0], 4)
    return str(int(value)) if value == int(value) else str(value)


WORDED = {
    "+": ("the sum of {a} and {b}", "{a} added to {b}", "the total of {a} and {b}", "{a} and {b} together", "{a} plus {b}", "{a} plus {b}"),
    "-": ("{a} minus {b}", "{a} less {b}", "the difference between {a} and {b}", "{a} take away {b}", "{b} subtracted from {a}"),
    "*": ("{a} times {b}", "{a} multiplied by {b}", "the product of {a} and {b}", "{a} times {b}", "{a} x {b}"),
    "/": ("{a} divided by {b}", "{a} over {b}", "{a} split by {b}", "the quotient of {a} and {b}", "{a} ÷ {b}"),
}  # fmt: skip


def spoken(text: str, rng: Random) -> str:
    """How a user may write the expression: as it is, without spaces, or in words."""
    r = rng.random()
    parts = text.split()
    if text.endswith("/ 100") and len(parts) == 5 and r < 0.85:
        return pick(rng, ("{p}% of {a}", "{p} percent of {a}", "{p} % of {a}", "{p} per cent of {a}")).format(
            a=parts[0], p=parts[2]
        )
    if len(parts) == 5 and parts[1] == parts[3] == "+" and r < 0.5:
        return pick(rng, ("the sum of {a}, {b} and {c}", "{a}, {b} and {c} together", "{a} plus {b} plus {c}")).format(
            a=parts[0], b=parts[2], c=parts[4]
        )
    if r < 0.4 or "(" in text:
        return text
    if r < 0.52:
        return text.replace(" ", "")
    if r < 0.58:
        return text.replace("*", "x").replace("/", "÷")
    if len(parts) == 3:
        return pick(rng, WORDED[parts[1]]).format(a=parts[0], b=parts[2])
    return " ".join(pick(rng, SPOKEN[part]) if part in SPOKEN else part for part in parts)


def listing(rng: Random) -> list[str]:
    return [values.filename(rng) if rng.random() < 0.8 else pick(rng, values.DIRS) + "/" for _ in range(rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 5, 6)))]  # fmt: skip


def settings_file(rng: Random, lines: int) -> tuple[str, str, str]:
    """A configuration file of about `lines` lines; returns (content, one key, its value)."""
    style = pick(
        rng,
        (
            "{k}={v}",
            "{k} = {v}",
            "{k}: {v}",
            '{k} = "{v}"',
            'export {k}="{v}"',
            '  "{k}": "{v}",',
            "{k}: int = {v}",
            "const {k} = {v};",
        ),
    )
    keys: list[str] = []
    while len(keys) < lines:
        key = pick(rng, ("{a}_{b}", "{a}", "{a}", "{b}_{a}", "max_{a}", "{a}_port", "{a}_timeout", "{a}_url")).format(
            a=values.word(rng), b=pick(rng, values.NOUNS)
        )
        key = key.upper() if "export" in style or "const" in style else key
        if key not in keys:
            keys.append(key)
    numeric = "int" in style or "const" in style
    filled = [
        str(values.number(rng))
        if numeric or rng.random() < 0.4
        else values.slug(rng)
        if rng.random() < 0.7
        else values.version(rng)
        for _ in keys
    ]
    rows = [style.format(k=k, v=v) for k, v in zip(keys, filled, strict=True)]
    if rng.random() < 0.3:
        rows.insert(
            0,
            pick(
                rng,
                (
                    "# settings",
                    "[main]",
                    "# generated file",
                    "// configuration",
                    "---",
                    "# " + values.sentence(rng),
                ),
            ),
        )
    chosen = int(rng.random() * len(keys))
    return "\n".join(rows), keys[chosen], filled[chosen]


def shell_output(rng: Random, command: str) -> str:
    head = command.split()[0]
    if head == "ls":
        return ("\n" if rng.random() < 0.5 else "  ").join(listing(rng))
    if head in ("wc", "du"):
        return f"{values.number(rng)} {values.path(rng)}"
    if head in ("pytest", "make", "cargo", "go", "npm"):
        return pick(
            rng,
            (
                "{n} passed",
                "{n} passed, {m} failed",
                "build ok in {n}s",
                "error: {w} not found",
                "Finished in {n}.{m}s",
                "{w}: done",
            ),
        ).format(n=rng.randint(1, 90), m=rng.randint(1, 9), w=values.word(rng))
    if head == "git":
        return pick(
            rng,
            (
                "On branch {b}",
                "{h} {t}",
                "nothing to commit",
                "M {p}",
                "Switched to branch '{b}'",
                "{h} {t}\n{g} {w}",
            ),
        ).format(
            b=values.slug(rng),
            h=values.MAKERS["hex"](rng),
            g=values.MAKERS["hex"](rng),
            t=values.title(rng),
            w=values.title(rng),
            p=values.path(rng),
        )
    return pick(
        rng,
        ("{s}", "{w}", "{p}: {s}", "{n}", "{w} {n}", "ok", "{a}\n{b}", "{w}: {n}%", "{i}", "total {n}\n{p}"),
    ).format(
        s=values.sentence(rng),
        w=values.word(rng),
        p=values.path(rng),
        n=values.number(rng),
        a=values.word(rng),
        b=values.slug(rng),
        i=values.version(rng),
    )


def log_line(rng: Random) -> str:
    return pick(rng, ("{l} {s}", "{t} {l} {s}", "[{l}] {w} {s}", "{w}: {s}", "{d} {t} {l}: {w} took {n} ms")).format(
        l=pick(rng, ("ERROR", "WARN", "INFO", "error", "warning", "FATAL")),
        s=values.sentence(rng),
        t=f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}:{rng.randint(0, 59):02d}",
        w=values.word(rng),
        d=values.iso_date(rng),
        n=values.number(rng),
    )


def sql(rng: Random) -> str:
    return pick(
        rng,
        (
            "SELECT * FROM {t}",
            "SELECT {c} FROM {t}",
            "SELECT COUNT(*) FROM {t}",
            "SELECT {c} FROM {t} WHERE {d} = {n}",
            "SELECT {c}, {d} FROM {t} LIMIT {n}",
            "select {c} from {t} order by {d}",
            "DELETE FROM {t} WHERE id = {n}",
            "UPDATE {t} SET {c} = {n}",
        ),
    ).format(t=values.word(rng) + "s", c=values.word(rng), d=pick(rng, values.NOUNS), n=rng.randint(1, 99))


def and_list(items: list[str], rng: Random | None = None) -> str:
    if len(items) == 1:
        return items[0]
    joined = ", ".join(items[:-1])
    return f"{joined} and {items[-1]}"


def filler(rng: Random, characters: int) -> str:
    """Irrelevant prose, notes and lists, for long contexts."""
    out: list[str] = []
    size = 0
    while size < characters:
        r = rng.random()
        if r < 0.55:
            lines = [values.sentence(rng) for _ in range(rng.randint(2, 6))]
            block = " ".join(line[:1].upper() + line[1:] + "." for line in lines)
        elif r < 0.7:
            block = f"## {values.title(rng)}"
        elif r < 0.85:
            block = "\n".join(f"- {values.sentence(rng)}" for _ in range(rng.randint(2, 5)))
        elif r < 0.95:
            block = settings_file(rng, rng.randint(2, 6))[0]
        else:
            block = "\n".join(log_line(rng) for _ in range(rng.randint(1, 4)))
        out.append(block)
        size += len(block) + 2
    return "\n\n".join(out)
