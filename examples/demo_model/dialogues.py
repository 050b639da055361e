"""Sessions: a set of tools, a system prompt and turns of several shapes.

A turn is one user message and everything up to the next: steps of calls with their results, then an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from examples.demo_model import composed, generic, phrasing, special, values
from examples.demo_model.grammar import expand
from examples.demo_model.kinds import Chain, Kind
from examples.demo_model.kinds_dev import CHAINS as DEV_CHAINS
from examples.demo_model.kinds_dev import KINDS as DEV_KINDS
from examples.demo_model.kinds_office import CHAINS as OFFICE_CHAINS
from examples.demo_model.kinds_office import KINDS as OFFICE_KINDS
from examples.demo_model.kinds_world import KINDS as WORLD_KINDS
from examples.demo_model.tools import Call, Tool, bind, make_tool, toolbox_style
from examples.demo_model.values import pick

KINDS: dict[str, Kind] = {k.key: k for k in [*WORLD_KINDS, *DEV_KINDS, *OFFICE_KINDS]}
CHAINS = [c for c in [*DEV_CHAINS, *OFFICE_CHAINS] if c.imp or c.ask]
GROUPS = [[k for k in group if k.key != "file_key"] for group in (WORLD_KINDS, DEV_KINDS, OFFICE_KINDS)]


@dataclass(frozen=True)
class Step:
    thinking: str
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Turn:
    shape: str  # single, chain, parallel, follow, error, talk, abilities, cannot, memory
    user: str
    steps: tuple[Step, ...]
    thinking: str
    answer: str
    must: tuple[str, ...] = ()
    note: str = ""  # a system message in the middle of the conversation, before the user's


@dataclass
class Session:
    system: str
    tools: list[Tool]
    turns: list[Turn] = field(default_factory=list)


class Writer:
    """Writes the turns of one session. held_out chooses the split of every value and tool name."""

    def __init__(
        self,
        rng: Random,
        held_out: bool,
        filler_characters: int = 0,
        tool_count: int | None = None,
        lines: int = 0,
        paste: float = 0.0,
    ) -> None:
        """filler_characters: irrelevant text in the system prompt.  tool_count: None for a random number.
        lines: length of settings files (0: a few).  paste: share of user messages that carry irrelevant text too.
        """
        self.rng, self.held_out, self.lines, self.paste = rng, held_out, lines, paste
        self.chains: list[tuple[Tool, Tool, Chain]] = []
        self.facts: list[tuple[str, str]] = []
        self.last: Call | None = None
        self.session = Session(phrasing.system_prompt(rng, filler_characters), self._tools(tool_count))

    # -- tools ---------------------------------------------------------------------------------------------------

    def _tools(self, count: int | None) -> list[Tool]:
        rng = self.rng
        if count is None:
            count = pick(rng, (0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6)) if rng.random() < 0.96 else rng.randint(7, 10)
        style, taken, tools = toolbox_style(rng), set(), []

        def add(kind: Kind) -> Tool:
            tool = make_tool(kind, rng, self.held_out, style, taken)
            tools.append(tool)
            return tool

        home = pick(rng, GROUPS)
        noun = pick(rng, generic.NOUNS)
        while len(tools) < count:
            r = rng.random()
            have = {tool.kind.key for tool in tools}
            if r < 0.2 and count - len(tools) >= 2:
                r = rng.random()
                if r < 0.4:
                    first, second, chain = composed.person_chain(rng)
                elif r < 0.7:
                    chain = pick(rng, CHAINS)
                    first, second = KINDS[chain.first], KINDS[chain.second]
                else:
                    first, second, chain = generic.random_chain(rng)
                if first.key in have or second.key in have:
                    continue
                self.chains.append((add(first), add(second), chain))
                continue
            if r < 0.58:
                kind = pick(rng, home if rng.random() < 0.7 else pick(rng, GROUPS))
            elif r < 0.8:
                kind = composed.composed_kind(rng)
            else:
                kind = generic.random_kind(rng, noun if rng.random() < 0.5 else None)
            if kind.key not in have:
                add(kind)
        rng.shuffle(tools)
        return tools

    # -- requests ------------------------------------------------------------------------------------------------

    def _request(self, kind: Kind, slots: dict[str, str], imp: str, ask: str, wrap: bool = True) -> str:
        rng = self.rng
        extra = [text for key, text in slots.items() if key.startswith("+")]
        imperative = bool(imp) and (not ask or rng.random() < 0.5)
        text = expand(imp if imperative else ask, rng, slots)
        for words in extra:
            text = text.rstrip("?.! ")
            text += words if words.startswith(",") else " " + words
        if not wrap:
            return text
        return phrasing.wrap_imperative(text, rng) if imperative else phrasing.wrap_question(text, rng)

    def _plan(self, tool: Tool) -> str:
        topic = tool.kind.topic
        topic = topic if not topic.startswith("to ") else topic[3:]
        return expand(
            "The user wants {t}. I use {n}.|This needs {n}.|I call {n} for {t}.|{t}: I use {n}.",
            self.rng,
            {"t": topic, "n": tool.name},
        )

    def _bind(self, tool: Tool, fixed: dict[str, str] | None = None, fail: bool = False) -> Call:
        if tool.kind.key == "read_file" and not fixed and self.rng.random() < 0.5:
            keyed = replace(tool, kind=KINDS["file_key"], optional=frozenset())
            return (
                bind(keyed, self.rng, self.held_out, fixed, self.lines, fail)
                if not fail
                else bind(tool, self.rng, self.held_out, fixed, 0, fail)
            )
        return bind(tool, self.rng, self.held_out, fixed, 0, fail)

    # -- turns ---------------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Write one more turn, append it to the session and return it."""
        made = self._disturb(self._turn())
        self.session.turns.append(made)
        return made

    def _disturb(self, turn: Turn) -> Turn:
        """Now and then surround the message with what agents inject: pasted text, reminders, system notes."""
        rng = self.rng
        r = rng.random()
        if r < self.paste:
            text = special.filler(rng, rng.randint(100, 900) if rng.random() < 0.8 else rng.randint(900, 3000))
            joined = f"{text}\n\n{turn.user}" if rng.random() < 0.5 else f"{turn.user}\n\n{text}"
            return replace(turn, user=joined)
        if r > 0.985:
            note = values.sentence(rng)
            return replace(turn, user=f"<system-reminder>{note}</system-reminder>\n{turn.user}")
        if r > 0.975:
            return replace(turn, note=expand(phrasing.NOTE, rng, {"s": values.sentence(rng)}))
        return turn

    def _turn(self) -> Turn:
        rng, tools = self.rng, self.session.tools
        r = rng.random()
        if not tools:
            return (
                self._memory() if r < 0.22 else self._cannot() if r < 0.36 else self._abilities() if r < 0.48 else self._talk()
            )
        if self.chains and r < 0.24:
            return self._chain()
        if r < 0.62:
            return self._single(fail=False)
        if r < 0.66:
            return self._single(fail=True)
        if r < 0.83:
            return self._parallel()
        if r < 0.89 and self.last and self.last.tool.kind.follow:
            return self._follow()
        if r < 0.92:
            return self._cannot()
        if r < 0.95:
            return self._memory()
        if r < 0.965:
            return self._abilities()
        if r < 0.985:
            return self._talk()
        return self._single(fail=False)

    def _single(self, fail: bool) -> Turn:
        tool = pick(self.rng, self.session.tools)
        call = self._bind(tool, fail=fail)
        user = self._request(call.tool.kind, call.slots, call.tool.kind.imp, call.tool.kind.ask)
        self.last = call
        return Turn(
            "error" if fail else "single",
            user,
            (Step(self._plan(tool), (call,)),),
            self._done(call),
            call.say,
            call.must,
        )

    def _done(self, call: Call) -> str:
        if "reason" in call.slots:
            return "The tool failed."
        return pick(self.rng, ("I have the answer.", "Now I can answer.", "The result is here."))

    def _chain(self) -> Turn:
        rng = self.rng
        first, second, chain = pick(rng, self.chains)
        fail = rng.random() < 0.05
        a = bind(first, rng, self.held_out, fail=fail, keep=True)
        linked = "?" if fail else a.slots[chain.field]
        b = bind(
            second,
            rng,
            self.held_out,
            {chain.arg: linked} if not fail or second.kind.args[0].type == "string" else None,
        )
        slots = {**b.slots, **a.slots}
        for key in [key for key in slots if key.startswith("+")]:
            if key in b.slots and key[1:] in b.slots:
                continue
            del slots[key]
        slots = {k: v for k, v in slots.items() if not k.startswith("+")}
        a, b = self._without_optional(a), self._without_optional(b)
        user = self._request(second.kind, slots, chain.imp, chain.ask)
        plan = expand(
            "First {a}, then {b}.|I need {a} first, then {b}.|Two steps: {a}, then {b}.",
            rng,
            {"a": first.name, "b": second.name},
        )
        if fail:
            return Turn("chain", user, (Step(plan, (a,)),), "The tool failed.", a.say, a.must)
        step = expand(
            "The {f} is {v}. Now {b}.|I got {v}. Next is {b}.",
            rng,
            {"f": chain.field, "v": linked, "b": second.name},
        )
        self.last = b
        return Turn("chain", user, (Step(plan, (a,)), Step(step, (b,))), self._done(b), b.say, b.must)

    def _without_optional(self, call: Call) -> Call:
        """The call without arguments that the request of a chain does not mention."""
        drop = {key[1:] for key in call.slots if key.startswith("+")}
        if not drop:
            return call
        names = {call.tool.params[key] for key in drop}
        arguments = {k: v for k, v in call.arguments.items() if k not in names}
        return replace(
            call,
            arguments=arguments,
            slots={k: v for k, v in call.slots.items() if k.lstrip("+") not in drop},
        )

    def _parallel(self) -> Turn:
        rng, tools = self.rng, self.session.tools
        count = 2 if rng.random() < 0.88 else 3
        same = len(tools) == 1 or rng.random() < 0.42
        chosen = [pick(rng, tools)] * count if same else rng.sample(tools, min(count, len(tools)))
        tool = chosen[0]
        if same and tool.kind.follow:
            key = tool.kind.follow
            calls = [self._without_optional(bind(tool, rng, self.held_out))]
            others = {k: v for k, v in calls[0].slots.items() if k in tool.params and k != key and k not in tool.optional}
            while len(calls) < count:
                call = self._without_optional(bind(tool, rng, self.held_out, others))
                if call.arguments not in [c.arguments for c in calls]:
                    calls.append(call)
            joint = special.and_list([call.slots[key] for call in calls])
            slots = {**calls[0].slots, key: joint}
            if rng.random() < 0.6:
                user = self._request(tool.kind, slots, tool.kind.imp, tool.kind.ask)
            else:
                user = self._request(tool.kind, calls[0].slots, tool.kind.imp, tool.kind.ask).rstrip("?.! ")
                tails = [
                    pick(
                        rng,
                        (
                            " and {}",
                            ", and {}",
                            ", also {}",
                            " and also {}",
                            ", {} too",
                            " and then {}",
                            ". Same for {}",
                        ),
                    ).format(c.slots[key])
                    for c in calls[1:]
                ]
                user += "".join(tails) + ("?" if rng.random() < 0.3 else ".")
        else:
            calls = []
            for item in chosen:
                calls.append(self._bind(item))
            parts = [
                self._request(c.tool.kind, c.slots, c.tool.kind.imp, c.tool.kind.ask, wrap=False).rstrip("?. ") for c in calls
            ]
            joiner = pick(
                rng,
                (
                    " and ",
                    " and ",
                    ", and ",
                    ", then ",
                    ". Also, ",
                    "; also ",
                    " and also ",
                    "? And ",
                    ". And ",
                    ", plus ",
                    " - and ",
                    "\n",
                    ". Then ",
                    " as well as ",
                    ". ",
                ),
            )
            text = joiner.join(parts)
            imperative = text.split(" ", 1)[0].lower() not in phrasing.QUESTION
            user = (
                phrasing.wrap_imperative(text, rng)
                if imperative and rng.random() < 0.6
                else phrasing.dress(text, rng, "." if imperative else "?")
            )
            if rng.random() < 0.08:
                user = (
                    pick(
                        rng,
                        (
                            "Two things: ",
                            "I need two things: ",
                            "Please do the following: ",
                            "Do these: ",
                            "Both please: ",
                        ),
                    )
                    + user
                )
        names = special.and_list(list(dict.fromkeys(c.tool.name for c in calls)))
        plan = expand(
            "{k} requests: I call {n}.|I can do {k} at once with {n}.|{k} calls: {n}.",
            rng,
            {"k": "two" if len(calls) == 2 else "three", "n": names},
        )
        plan = plan[:1].upper() + plan[1:]
        self.last = calls[-1]
        return Turn(
            "parallel",
            user,
            (Step(plan, tuple(calls)),),
            pick(rng, ("I have all results.", "Now I can answer.")),
            " ".join(c.say for c in calls),
            tuple(m for c in calls for m in c.must),
        )

    def _follow(self) -> Turn:
        rng, last = self.rng, self.last
        assert last is not None
        tool, key = last.tool, last.tool.kind.follow
        others = {
            k: v for k, v in last.slots.items() if k in tool.params and k != key and k not in tool.optional and k != "+" + key
        }
        if tool.kind.key == "file_key" or any(isinstance(v, list) for v in last.arguments.values()):
            return self._single(fail=False)
        if any(item.maker == "calc" for item in tool.kind.args):
            others = {}
        call = self._without_optional(bind(tool, rng, self.held_out, others))
        value = call.slots[key]
        user = expand(
            "[and|what about|how about|and what about|now|and now|same for|the same for|also|and for|do the same for|now for|then|next] {v}[ please|]",
            rng,
            {"v": value},
        )
        self.last = call
        return Turn(
            "follow",
            phrasing.dress(user, rng, "?"),
            (Step(self._plan(tool), (call,)),),
            self._done(call),
            call.say,
            call.must,
        )

    def _cannot(self) -> Turn:
        rng = self.rng
        have = {tool.kind.topic for tool in self.session.tools}
        for _ in range(20):
            kind = pick(rng, pick(rng, GROUPS)) if rng.random() < 0.7 else generic.random_kind(rng)
            if kind.topic not in have and not self._similar(kind):
                break
        else:
            return self._talk()
        call = bind(make_tool(kind, rng, self.held_out, toolbox_style(rng), set()), rng, self.held_out)
        user = self._request(kind, {k: v for k, v in call.slots.items() if not k.startswith("+")}, kind.imp, kind.ask)
        return Turn("cannot", user, (), "No tool fits.", expand(phrasing.CANNOT, rng))

    def _similar(self, kind: Kind) -> bool:
        """Whether a declared tool could reasonably serve this kind, so that refusing would be wrong."""
        vague = {
            "run",
            "sql",
            "http",
            "web_search",
            "wiki",
            "note_search",
            "grep",
            "find_file",
            "message",
            "email",
            "post",
            "kv_get",
            "task",
            "note",
            "env",
        }
        mine = set(kind.key.split("_"))
        for tool in self.session.tools:
            if (
                tool.kind.key in vague
                or mine & set(tool.kind.key.split("_"))
                or set(kind.topic.split()) & (set(tool.kind.topic.split()) - {"a", "the", "to", "of", "an"})
            ):
                return True
        return kind.key in {"read_file", "write_file", "append_file", "replace"} and any(
            t.kind in DEV_KINDS for t in self.session.tools
        )

    def _memory(self) -> Turn:
        rng = self.rng
        if self.facts and rng.random() < 0.6:
            what, value = pick(rng, self.facts)
            user = expand(
                "[what's|what is|what was|do you remember|remind me of|tell me again] my {w}|I forgot my {w}, what [is|was] it",
                rng,
                {"w": what},
            )
            return Turn(
                "memory",
                phrasing.dress(user, rng, "?"),
                (),
                "I remember that.",
                expand("Your {w} is {v}.", rng, {"w": what, "v": value}),
                (value,),
            )
        what, maker = pick(
            rng,
            (
                ("name", "someone"),
                ("code", "id"),
                ("project", "slug"),
                ("email", "email"),
                ("city", "city"),
                ("favorite word", "word"),
                ("room number", "number"),
                ("dog", "invented"),
                ("cat", "invented"),
                ("order", "id"),
                ("branch", "branch"),
                ("boss", "person"),
                ("team", "invented"),
                ("lucky number", "number"),
            ),
        )
        value = str(values.make(maker, rng, self.held_out))
        self.facts = [(w, v) for w, v in self.facts if w != what] + [(what, value)]
        user = expand(
            "my {w} is {v}|[remember|note|please remember|keep in mind] that my {w} is {v}|[just so you know|fyi|for later|by the way], my {w} is {v}",
            rng,
            {"w": what, "v": value},
        )
        return Turn(
            "memory",
            phrasing.dress(user, rng, "."),
            (),
            "The user tells me something.",
            expand(
                "[Ok|Good|Noted|Thanks], your {w} is {v}.|I will remember that your {w} is {v}.",
                rng,
                {"w": what, "v": value},
            ),
            (value,),
        )

    def _abilities(self) -> Turn:
        rng, tools = self.rng, self.session.tools
        user = expand(phrasing.ABILITIES, rng)
        user = user[:1].upper() + user[1:] if rng.random() < 0.6 else user
        if not tools:
            return Turn("abilities", user, (), "I have no tools.", expand(phrasing.NO_TOOLS, rng))
        names = special.and_list([tool.name for tool in tools])
        return Turn(
            "abilities",
            user,
            (),
            "I list my tools.",
            expand(
                "I can use {n}.|My tools are {n}." if len(tools) > 1 else "I can use {n}.|My tool is {n}.",
                rng,
                {"n": names},
            ),
            tuple(t.name for t in tools),
        )

    def _talk(self) -> Turn:
        rng = self.rng
        user, answer = phrasing.talk(rng, self.held_out)
        return Turn("talk", user, (), pick(rng, ("Just talk.", "No tool needed.")), answer)
