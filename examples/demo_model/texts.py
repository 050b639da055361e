"""Texts of several lines and longer phrases: listings, files, command output, definitions, errands, orders."""

from __future__ import annotations

from random import Random

from examples.demo_model import special, values
from examples.demo_model import vocabulary as v
from examples.demo_model.grammar import expand
from examples.demo_model.values import pick

OWNERS = ("root root", "root root", "app app", "user staff", "www-data www-data", "{u} {u}", "{u} users", "node node")
MODES = ("-rw-r--r--", "-rw-r--r--", "-rw-r--r--", "-rwxr-xr-x", "-rw-------", "-rw-rw-r--", "-r--r--r--")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
ERRAND = (
    "{a} the {t}|{a} the {q} {t}|{a} the {t} {u}|{a} {p} about the {t}|{a} the {t} for {p}|call {p}|call the {t}|call {p} about the {q} {t}|"
    "pick up {p} from the {t}|pick up the {t} from the {u}|take the {t} to the {u}|{a} the {t} and the {u}|pay the {t} [bill|{u}]|"
    "{a} the {q} {t} before the {u}|{a} my {t}|{a} a {q} {t}|buy {t}s and {u}s|water the plants|take out the trash|{a} the {q} {t} {u}|"
    "submit the {t} [form|report]|check the {t} in the {u}|{a} some {t} for the {u}|send the {t} to {p}|{a} with {p} and {r}|{a} {p}'s {t}"
)
WHEN = (
    "{c}|{c}|{c}|tomorrow|tomorrow [morning|evening|afternoon|at {c}]|{d}|{d} [morning|evening|at {c}]|next {d}|tonight|noon|"
    "[this|tomorrow] [evening|afternoon]|in {n} [minutes|hours]|{c} [today|tonight|tomorrow]|today at {c}|{h} [in the morning|o'clock]"
)
DEFINITION = (
    "[a|any] [small|large|kind of|piece of|{q}|thin|special] {t} [that|which] [people {a} in|is used to {a}|one can {a} with|stands near] [a|the] {u}|"
    "[having|showing|full of|without] [a|much|little|great] [{t}|{u}] [and|or] {u}|"
    "to {a} or {b} something [{h}|in a {q} way|without a {t}|again and again]|the [act|state|habit|art] of [being {q}|having no {t}|wanting to {a}], [often|mostly|also] in a {u}|"
    "a person who [wants to {a}|is always {q}|looks after the {t}] and [{b}s|never {b}s] the {u}|very {q} and [{r}|hard to {a}]|"
    "lasting for [only a short|a very long|a {q}] time; {r}|a {q} [place|room|area] where [people {a}|a {t} is kept|you can {b}]"
)
CODE = (
    "def {w}({x}):|    return {x} * {n}|    return {x} + {w}|import {w}|from {w} import {y}|print({w})|for {x} in {y}:|if {x} > {n}:|    {x} = {n}|"
    "{x} = {w}({n})|const {x} = {n};|function {w}({x}) \\{ return {y}; }|let {x} = \"{s}\";|# {s}|// {s}|class {C}:|    pass|x = {n}|y = {n}|"
    "    print(\"{s}\")|assert {x} == {n}|echo \"{s}\"|cd {w}|export {C}={n}|#!/bin/bash|set -e|    {y}.append({x})|return {n}|\\}"
)  # fmt: skip


def errand(rng: Random) -> str:
    """Something to do, of two to eight words."""
    return expand(ERRAND, rng, _words(rng) | {"p": _who(rng), "r": values.first_name(rng)})


def when(rng: Random) -> str:
    """A time as people say it."""
    return expand(WHEN, rng, {"c": values.clock(rng), "d": pick(rng, values.DAYS), "n": rng.randint(2, 50), "h": rng.randint(1, 12)})  # fmt: skip


def definition(rng: Random) -> str:
    """What a dictionary says: a phrase, sometimes a whole sentence or two meanings."""

    def one() -> str:
        return expand(DEFINITION, rng, _words(rng) | {"h": pick(rng, v.HOW), "r": pick(rng, v.QUALITIES)})

    text = one()
    if rng.random() < 0.15:
        text += "; " + one()
    return text[0].upper() + text[1:] if rng.random() < 0.3 else text


def flight(rng: Random) -> str:
    return values.letters(rng, 2, 2).upper() + pick(rng, ("", "", " ")) + values.digits(rng, 2, 4)


def _who(rng: Random) -> str:
    return pick(rng, (values.first_name(rng), values.first_name(rng), "mom", "the dentist", "my brother", "grandma", "the landlord", "the team", "dad"))  # fmt: skip


def _words(rng: Random) -> dict[str, str]:
    return {
        "a": pick(rng, v.ACTIONS), "b": pick(rng, v.ACTIONS), "t": pick(rng, v.THINGS), "u": pick(rng, v.THINGS), "q": pick(rng, v.QUALITIES),
    }  # fmt: skip


def names(rng: Random, count: int) -> list[str]:
    """Different names of files and folders, as one folder holds them."""
    made: list[str] = []
    while len(made) < count:
        name = values.filename(rng) if rng.random() < 0.75 else pick(rng, values.DIRS)
        if name not in made:
            made.append(name)
    return made


def long_listing(rng: Random, entries: list[str]) -> str:
    """What `ls -la` prints."""
    owner = pick(rng, OWNERS).format(u=values.username(rng))
    lines = [f"total {rng.randint(1, 40) * 4}"] if rng.random() < 0.8 else []
    if rng.random() < 0.4:
        entries = [".", "..", *entries]
    day = f"{pick(rng, MONTHS)} {rng.randint(1, 30):2d}"
    for name in entries:
        is_folder = "." not in name.strip(".")
        mode = pick(rng, ("drwxr-xr-x", "drwx------")) if is_folder else pick(rng, MODES)
        links, size = (rng.randint(2, 9), 4096) if is_folder else (1, rng.randint(8, 99999))
        if rng.random() < 0.5:
            day = f"{pick(rng, MONTHS)} {rng.randint(1, 30):2d}"
        lines.append(
            f"{mode} {links} {owner} {size:{pick(rng, (1, 6))}d} {day} {rng.randint(0, 23):02d}:{rng.randint(0, 59):02d} {name}"
        )
    return "\n".join(lines)


def file_text(rng: Random) -> str:
    """A file of one to about a dozen lines: settings, code, notes, tables, logs."""
    r = rng.random()
    count = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 9))
    if r < 0.2:
        return special.settings_file(rng, count)[0]
    if r < 0.4:
        return "\n".join(_code_line(rng) for _ in range(count))
    if r < 0.5:
        head = f"# {values.title(rng)}\n" + ("\n" if rng.random() < 0.6 else "")
        return head + "\n".join(pick(rng, ("- {}", "{}", "{}.", "## {}")).format(values.sentence(rng)) for _ in range(count))
    if r < 0.62:
        mark = pick(rng, ("- ", "* ", "", "[ ] ", "{} "))
        return "\n".join(mark.format(f"{i}.") + errand_or_thing(rng) for i in range(1, count + 1))
    if r < 0.74:
        return "\n".join(special.log_line(rng) for _ in range(count))
    if r < 0.84:
        columns = [pick(rng, v.THINGS) for _ in range(rng.randint(2, 3))]
        rows = [
            ",".join(str(values.number(rng)) if rng.random() < 0.5 else values.word(rng) for _ in columns) for _ in range(count)
        ]
        return "\n".join([",".join(columns), *rows])
    if r < 0.9:
        keys = [pick(rng, values.NOUNS) for _ in range(count)]
        inner = ",\n".join(
            f'  "{key}": {pick(rng, (str(values.number(rng)), chr(34) + values.slug(rng) + chr(34), "true"))}' for key in keys
        )
        return "{\n" + inner + "\n}"
    return "\n".join(values.sentence(rng) for _ in range(count))


def errand_or_thing(rng: Random) -> str:
    return errand(rng) if rng.random() < 0.5 else pick(rng, v.THINGS)


def _code_line(rng: Random) -> str:
    word = values.word(rng)
    return expand(CODE, rng, {"w": word, "x": pick(rng, "abcinxy"), "y": values.word(rng), "n": rng.randint(0, 99), "s": values.sentence(rng), "C": word.capitalize()})  # fmt: skip


def shell_command(rng: Random) -> str:
    """A command whose output output_of() knows."""
    made = pick(
        rng,
        ("ls -la", "ls -l", "ls -la {f}", "ls -l {f}", "ls", "ls {f}", "ls -1 {f}", "find {f} -type f", "cat {p}", "cat {p}", "head {p}", "tail {p}", "tail -n {n} {p}",
         "git log --oneline", "git log -{n} --oneline", "git status", "git status", "df -h", "df", "ps", "ps aux", "du -sh *", "du -h {f}", "{c}", "{c}", "{c}"),
    )  # fmt: skip
    return made.format(f=values.folder(rng), p=values.path(rng), n=rng.randint(2, 9), c=values.command(rng))


def output_of(rng: Random, command: str) -> str:
    """What a shell command might print, often several lines with words that repeat."""
    count = rng.choice((1, 2, 2, 3, 3, 4, 5))
    head = command.split()[0]
    if command.startswith("ls -l"):
        return long_listing(rng, names(rng, count))
    if head in ("ls", "find"):
        return "\n".join(names(rng, count + 1))
    if head in ("cat", "head", "tail"):
        return file_text(rng)
    if command.startswith("git log"):
        return "\n".join(f"{values.MAKERS['hex'](rng)} {values.title(rng)}" for _ in range(count))
    if command == "git status":
        changed = "\n".join(
            pick(rng, (" M {}", "?? {}", "A  {}", "\tmodified:   {}")).format(values.path(rng)) for _ in range(count)
        )
        return pick(rng, ("On branch {b}\n{c}", "On branch {b}\nnothing to commit, working tree clean", "{c}")).format(
            b=values.slug(rng), c=changed
        )
    if head == "df":
        lines = [
            f"/dev/sd{pick(rng, 'abc')}{i} {rng.randint(5, 900)}G {rng.randint(1, 99)}G {rng.randint(1, 99)}% /{pick(rng, values.DIRS)}"
            for i in range(1, count + 1)
        ]
        return "\n".join(["Filesystem Size Used Use% Mounted on", *lines])
    if head == "ps":
        lines = [
            f"{rng.randint(1, 9999)} pts/{rng.randint(0, 3)} {rng.randint(0, 59):02d}:{rng.randint(0, 59):02d} {values.service(rng)}"
            for _ in range(count)
        ]
        return "\n".join(["PID TTY TIME CMD", *lines])
    if head == "du":
        return "\n".join(f"{rng.randint(4, 990)}{pick(rng, 'KMG')}\t{values.folder(rng)}" for _ in range(count))
    return special.shell_output(rng, command)


def needle(rng: Random) -> str:
    """A word or a piece of code to look for in files."""
    return pick(
        rng,
        (
            pick(rng, v.THINGS),
            pick(rng, v.ACTIONS),
            values.word(rng),
            values.word(rng),
            values.pattern(rng),
            values.pattern(rng),
        ),
    )


def order_rows(rng: Random) -> list[str]:
    """Orders as "id (thing)" or "id: thing, state"."""
    form = pick(rng, ("{i} ({t})", "{i}: {t}", "{i} {t}", "{i} - {t}, {s}", "{i} ({t}, {s})", "{i}"))
    prefix, made = values.letters(rng, 1, 3).upper() + pick(rng, "-- "), []
    for _ in range(rng.choice((1, 2, 2, 2, 3, 3, 4))):
        i = prefix.strip() + values.digits(rng, 2, 4) if rng.random() < 0.7 else values.code_id(rng)
        made.append(
            form.format(
                i=i,
                t=values.MAKERS["thing"](rng),
                s=pick(rng, ("shipped", "pending", "delivered", "cancelled", "open", "paid")),
            )
        )
    return list(dict.fromkeys(made))


def hit_line(rng: Random, pattern: str) -> str:
    """A line of text that contains the pattern."""
    return pick(
        rng, ("{p}", "{p} = {n}", "# {p} {s}", "{w} {p} {y}", "    {p}({w})", "{p}: {s}", "// {p}", "{w}.{p}", "log({p})", "return {p}", "{s} {p}", "{p} {s}"),
    ).format(p=pattern, n=values.number(rng), s=values.sentence(rng), w=values.word(rng), y=pick(rng, v.THINGS)).strip()  # fmt: skip


def hits(rng: Random, pattern: str, folder: str) -> list[str]:
    """What grep prints: file, line number, line."""
    base = folder.rstrip("/")
    form = pick(rng, ("{f}:{n}:{l}", "{f}:{n}: {l}", "{f}:{n}", "{f}", "{f}:{l}"))
    found = names(rng, rng.choice((1, 2, 2, 3)))
    return [form.format(f=f"{base}/{name}", n=rng.randint(1, 300), l=hit_line(rng, pattern)) for name in found]


values.MAKERS.update(
    {"errand": errand, "when": when, "definition": definition, "flight": flight, "needle": needle, "shellcmd": shell_command, "filetext": file_text}
)  # fmt: skip
