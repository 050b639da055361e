"""Sessions with plain toolboxes and everyday wording: stories around a request, tools that nearly fit, steps that build on results.

Each toolbox holds tools that could take each other's results, and most requests need only one of them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

from examples.demo_model import phrasing, special, sums, texts, values
from examples.demo_model import vocabulary as v
from examples.demo_model.dialogues import Step, Turn, Writer
from examples.demo_model.grammar import expand
from examples.demo_model.kinds import Kind
from examples.demo_model.kinds_everyday import CHAINS, EVERYDAY, KITS
from examples.demo_model.tools import Call, Tool, bind, make_tool
from examples.demo_model.values import pick

LEAD = (
    "I'm [planning|organizing|preparing|thinking about] [a trip|a weekend away|a small party|our holiday|a move|a visit|a surprise] [with|for] [my family|two friends|{p}|my parents|the kids|our team]|"
    "my [colleague|boss|friend|sister|neighbor|flatmate|teacher|cousin|manager] {p} [changed something|broke it|left early|asked me about it|is waiting for an answer|sent me a strange message|told me to look at it|just called] [yesterday|this morning|again|while I was away|last night|]|"
    "[we are|I am] [writing|finishing|reviewing|putting together] [a report|a summary|our documentation|a presentation|an article] [for {p}|about the {t}|for the {t} team|and the numbers are missing|]|"
    "I [was|have been] [on holiday|ill|in meetings|away|offline] [all week|since {d}|for days] and [missed everything|forgot the details|lost track|don't know how it went]|"
    "there was [a problem|trouble|some confusion|a long discussion|a failure] [with the {t}|about the {t}|at work|in the {t}] [yesterday|this morning|last night|]|"
    "the {t} [stopped working|looks odd|is {q}|changed overnight|failed] [and nobody knows why|since yesterday|again|]|"
    "I [have|had] [a long day|a call with {p}|a meeting about the {t}] and my {t} is [still|] {q}|my {t} [arrives|starts|ends|leaves] [soon|at {c}|on {d}] and I [don't want to be late|still have to prepare|am nervous|hate surprises]|"
    "{p} and I [are|were] [talking|arguing|wondering] about [the {t}|this] [on the train|over lunch|yesterday|]|[it's|it is|this is] for [a school project|my grandmother|a quiz tonight|an article about the {t}|the new {t}|a friend of mine]|"
    "I'm [standing|sitting] [in the {t}|in front of the {t}|at the {t}] [with|without] my {t}|[we|they] [moved|changed] the {t} [last week|in {m}|before I came]|"
    "I [promised|told] {p} [to look into it|an answer|that I would check] [today|before {c}|]|my [son|daughter|mother|client] [keeps asking|wants to know|is curious|doesn't believe me]|I'm new [in this project|at this company|here] and [still learning|a bit lost|don't know my way around]"
)
WHY = (
    "so [that |]I [know|can see|understand|can tell {p}|find out] [what went wrong|where we stand|what to do next|how it looks|if we are ready|what to expect|what happened]|"
    "because I [need it for the {t}|have to tell {p}|don't trust the {t}|forgot it|want to be sure]|I [want|need] to [show it to {p}|be sure|put it in the report|know before the meeting|get ready]|"
    "before [I leave|we start|the meeting|{p} calls|lunch|I go to bed]|since I [am going there|have no time|can't look myself]|while I [make coffee|look for my {t}|am on the phone]"
)
FREE_TEXT = {"email", "message", "note", "reminder", "task", "event", "web_search", "wiki", "note_search", "news", "write_file"}
BOTH = ("both {0} and {1}", "both {0} and {1}", "{0} and also {1}", "{0} as well as {1}", "{0} and then {1}", "{0} and {1}", "{0} and {1}", "first {0} and then {1}", "{0} plus {1}", "each of {0} and {1}")  # fmt: skip
COMPARE = {
    "weather": "is it [warmer|colder|nicer|sunnier] in {a} or [in |]{b}|compare the weather [in|of] {a} and {b}|[where|in which city] is it [warmer|colder], {a} or {b}|weather in {a} [vs|versus] {b}|should I [go|travel|fly] to {a} or {b}, where is it [warmer|drier]",
    "time": "compare the time in {a} and {b}|is it later in {a} or [in |]{b}|what's the time difference between {a} and {b}",
    "flight_status": "are [flights |]{a} and {b} [both |]on time|which [flight |one ]is delayed, {a} or {b}|is [either |]{a} or {b} [cancelled|delayed]",
    "order": "are [orders |]{a} and {b} [both |][shipped|delivered]|which order [comes|arrives] first, {a} or {b}",
    "track": "which [parcel|package] is closer, {a} or {b}|have [parcels |]{a} and {b} [both |]arrived",
    "define": "what's the difference between {a} and {b}|how do {a} and {b} differ",
    "country_info": "which [country |]has more people, {a} or {b}|compare {a} and {b}|is {a} bigger than {b}",
}
NOTHING = (
    "[]",
    "{}",
    "No results.",
    "no matches",
    "none",
    "nothing found",
    '{"results": []}',
    '{"count": 0}',
    '{"found": false}',
    "null",
    "(empty)",
)
BY_NAME = "list {f} and [then |]read {n}|see what's in {f}, then [open|read|show me] {n}|look [into|in] {f} and show me what's in {n}|check whether {f} has {n} and [read|open] it|list the files in {f}, then open {n}"
BY_END = "[read|open|show me] the [.{e}|{e}] file in {f}|find the [.{e}|{e}] file in {f} and [show me its contents|read it|open it]|look in {f}, there is [a|one] .{e} file; [what does it say|read it]|list {f} and read the .{e} file|what does the .{e} file in {f} say"
BY_STEM = "list {f} and read the [file|one] about {s}|find the {s} file in {f} and [read|open] it|there is a file about {s} in {f}, what does it say|[which|what] file in {f} is about {s}? [Open|Read] it|[look|see] what's in {f} and show me the {s} file|open the {s} file [from|in] {f}"
ONLY = "[list|look in|look into|check|go to] [the folder |the directory |]{f} and [then |][open|read|show me] [the file that is in it|whatever is there|the file there|the one file in it|the file you find]|list [the folder |]{f}, then [open|read] [the file|the file in it|that file]|[open|read] whatever is in [the folder |]{f}|there is [one|a single] file in {f}, [read|show|open] it|list {f} and [read|open] the [only|first] file [there|you find|in it]|what does the [only |]file in {f} say|read the [only |]file in {f}|find out what's in {f} and read [me |]that file"


def story(text: str, rng: Random, imperative: bool, open_end: bool = False) -> str:
    """The request inside a longer message, whose other clauses are no requests.

    open_end: the request may end with free text, so nothing may follow it.
    """
    slots = {
        "p": values.first_name(rng), "t": pick(rng, v.THINGS), "q": pick(rng, v.QUALITIES), "c": values.clock(rng),
        "d": pick(rng, values.DAYS), "m": pick(rng, ("March", "June", "August", "autumn", "spring", "January")),
    }  # fmt: skip
    lead, why = " ".join(expand(LEAD, rng, slots).split()), " ".join(expand(WHY, rng, slots).split())
    text = text.rstrip("?.! ").replace("  ", " ")
    words = [word.lower() for word in text.split(" ", 2)[:2]]
    asking = phrasing.QUESTION | {"would", "shall"}
    question = not imperative and (words[0] in asking or words[-1] in ("which", "what"))
    big = lambda words: words[:1].upper() + words[1:]  # noqa: E731
    r = rng.random() * (0.5 if open_end else 1.0)
    if question:
        if r < 0.4 or open_end:
            made = f"{lead}{pick(rng, ('. ', '. ', ' - ', ', and I wonder: ', ', so ', '. Tell me, '))}{text}?"
            made = made.replace(". " + text, ". " + big(text))
        elif r < 0.65:
            made = f"{text}? {big(lead)}."
        elif r < 0.8:
            made = (
                f"{text}? {pick(rng, ('I ask ', 'Tell me ', 'Just asking '))}{why}."
                if not why.startswith("I ")
                else f"{text}? {why}."
            )
        else:
            made = f"{lead}, {pick(rng, ('can you tell me', 'do you know', 'could you find out', 'please tell me'))}: {text}?"
    else:
        ask = pick(rng, ("could you ", "can you ", "please ", "would you ", "could you please ", "I'd like you to ", "I want you to ", "")) if imperative else ""  # fmt: skip
        if not imperative and r < 0.8:
            made = f"{lead}. {big(text)}" if r < 0.5 else f"{text}. {big(lead)}"
        elif r < 0.35:
            made = f"{lead}{pick(rng, (', so ', ', ', ' and so ')) if ask else '. '}{ask}{text}"
        elif r < 0.55:
            made = f"{lead}. {big(ask + text)}"
        elif r < 0.8:
            made = f"{ask}{text}{', ' if rng.random() < 0.4 or why.startswith('I ') else ' '}{why}"
        elif r < 0.9:
            made = f"{ask}{text}{'?' if ask.startswith(('could', 'can', 'would')) else '.'} {big(lead)}."
        else:
            made = f"{lead}. {big(ask + text)} {why}" if not why.startswith("I ") else f"{lead}. {big(ask + text)}, {why}"
        if made[-1] not in ".?!" and rng.random() < 0.8:
            made += "?" if ask.startswith(("could", "can", "would")) and rng.random() < 0.8 else "."
    return big(made) if rng.random() < 0.8 else made


class Everyday(Writer):
    """Writes sessions of this kind; see the module."""

    def _tools(self, count: int | None) -> list[Tool]:
        rng = self.rng
        style = {
            "case": pick(rng, ("snake",) * 8 + ("camel", "dash")), "prefix": "", "titles": False, "closed": rng.random() < 0.15,
            "describe": rng.random(), "returns": False, "arg_case": pick(rng, ("snake",) * 6 + ("camel",)),
        }  # fmt: skip
        if rng.random() < 0.4:
            chain = pick(rng, CHAINS)
            keys = [chain.first, chain.second]
            kits = [kit for kit in KITS if chain.first in kit or chain.second in kit]
        else:
            keys, kits = [], list(KITS)
        goal = count or pick(rng, (1, 2, 2, 3, 3, 3, 4, 4, 5))
        pool = list(pick(rng, kits))
        rng.shuffle(pool)
        keys = list(dict.fromkeys([*keys, *pool]))[: max(goal, len(keys))]
        if rng.random() < 0.3:
            keys.append(pick(rng, list(EVERYDAY)))
        keys = list(dict.fromkeys(keys))
        twins = ({"list_folder", "list_long"}, {"search_text", "search_file"}, {"read_text", "file_setting"})
        for twin in twins:
            if twin <= set(keys):
                keys.remove(pick(rng, sorted(twin)))
        taken: set[str] = set()
        made: dict[str, Tool] = {}
        for key in keys:
            made[key] = make_tool(EVERYDAY[key], rng, self.held_out, style, taken)
        for chain in CHAINS:
            if chain.first in made and chain.second in made:
                self.chains.append((made[chain.first], made[chain.second], chain))
        tools = list(made.values())
        rng.shuffle(tools)
        return tools

    def _request(self, kind: Kind, slots: dict[str, str], imp: str, ask: str, wrap: bool = True) -> str:
        rng = self.rng
        if kind.key == "reminder":
            time = slots["time"]
            bare = (
                time[0].isdigit() or time in ("noon", "midnight", "sunset", "lunchtime") or time.startswith(("half", "quarter"))
            )
            slots = {**slots, "at": f"at {time}" if bare else f"on {time}" if time.startswith(tuple(values.DAYS)) else time}
        if not wrap or rng.random() < 0.5:
            return super()._request(kind, slots, imp, ask, wrap)
        imperative = bool(imp) and (not ask or rng.random() < 0.5)
        text = super()._request(kind, slots, imp if imperative else "", "" if imperative else ask, wrap=False)
        if kind.key == "calc":  # its phrases are of both sorts
            imperative = text.split(" ", 1)[0].lower() in sums.VERBS
        return story(text, rng, imperative, kind.key in FREE_TEXT)

    def _bind(self, tool: Tool, fixed: dict[str, str] | None = None, fail: bool = False) -> Call:
        whole = self.rng.random() < (0.82 if "\n" not in tool.kind.say else 0.96)
        if fail and tool.kind.key == "file_setting":
            tool = replace(tool, kind=EVERYDAY["read_text"])
        return bind(tool, self.rng, self.held_out, fixed, self.lines, fail, keep=whole and not fail)

    def _find(self, *keys: str) -> Tool | None:
        return next((tool for tool in self.session.tools if tool.kind.key in keys), None)

    def _turn(self) -> Turn:
        rng = self.rng
        r = rng.random()
        lister, reader, calc = self._find("list_folder", "list_long"), self._find("read_text"), self._find("calc")
        if self.chains and r < 0.2:
            return self._chain()
        if lister and reader and r < 0.32:
            return self._list_then_read(lister, reader)
        if calc and r < 0.34:
            return self._two_steps(calc)
        if r < 0.46:
            return self._both()
        if r < 0.52:
            return super()._turn()
        return self._single(fail=rng.random() < 0.03)

    def _chain(self) -> Turn:
        turn = super()._chain()
        if len(turn.steps) == 2 and self.rng.random() < 0.3:  # sometimes the answer tells both results
            first, second = turn.steps[0].calls[0], turn.steps[1].calls[0]
            if "\n" not in first.say:
                return replace(turn, answer=f"{first.say} {second.say}", must=first.must + second.must)
        return turn

    def _single(self, fail: bool) -> Turn:
        turn = super()._single(fail)
        if fail or self.rng.random() > 0.025:
            return turn
        (step,) = turn.steps  # now and then a tool finds nothing
        call = replace(step.calls[0], result=pick(self.rng, NOTHING))
        answer = expand("Nothing was found.|I found nothing.|The tool found nothing.|There is no result.", self.rng)
        return replace(turn, steps=(Step(step.thinking, (call,)),), thinking="Nothing was found.", answer=answer, must=())

    def _cannot(self) -> Turn:
        return self._single(fail=False)  # these toolboxes serve too much for a sure refusal

    def _parallel(self) -> Turn:
        turn = super()._parallel()
        said = [call.say for call in turn.steps[0].calls]
        return replace(turn, answer="\n".join(said)) if any("\n" in say for say in said) else turn

    def _both(self) -> Turn:
        rng = self.rng
        fitting = [t for t in self.session.tools if t.kind.follow and t.kind.key != "calc" and "\n" not in t.kind.say]
        if not fitting or rng.random() < 0.25:
            return self._parallel() if not self._find("calc") else self._single(fail=False)
        tool = pick(rng, fitting)
        key = tool.kind.follow
        calls = [self._without_optional(self._bind(tool))]
        others = {k: x for k, x in calls[0].slots.items() if k in tool.params and k != key and k not in tool.optional}
        for _ in range(20):
            call = self._without_optional(self._bind(tool, others))
            if call.arguments not in [c.arguments for c in calls]:
                calls.append(call)
            if len(calls) == 2:
                break
        else:
            return self._single(fail=False)
        joint = pick(rng, BOTH).format(*(c.slots[key] for c in calls))
        if rng.random() < 0.12:
            third = self._without_optional(self._bind(tool, others))
            if third.arguments not in [c.arguments for c in calls]:
                calls.append(third)
                joint = special.and_list([c.slots[key] for c in calls])
        kind = tool.kind
        phrase = COMPARE.get(kind.key, "") if len(calls) == 2 and rng.random() < 0.35 else ""
        if phrase:
            pair = {"a": calls[0].slots[key], "b": calls[1].slots[key]}
            text = expand(phrase, rng, pair)
            question = not text.startswith(("compare", "weather"))
            user = story(text, rng, not question) if rng.random() < 0.4 else phrasing.dress(text, rng, "?" if question else ".")
        else:
            user = self._request(kind, {**calls[0].slots, key: joint}, kind.imp, kind.ask)
        words = {"k": "two" if len(calls) == 2 else "three", "n": tool.name}
        plan = expand("{k} requests: I call {n}.|I can do {k} at once with {n}.|{k} calls: {n}.", rng, words)
        self.last = calls[-1]
        return Turn(
            "parallel", user, (Step(plan[:1].upper() + plan[1:], tuple(calls)),), pick(rng, ("I have all results.", "Now I can answer.")),
            " ".join(c.say for c in calls), tuple(m for c in calls for m in c.must),
        )  # fmt: skip

    def _two_steps(self, calc: Tool) -> Turn:
        rng = self.rng
        first, second, request = sums.two_steps(rng)
        a, b = (self._calculation(calc, expression) for expression in (first, second))
        question = request.split(" ", 1)[0] in phrasing.QUESTION
        if rng.random() < 0.3:
            user = story(request, rng, request.split(" ", 1)[0] in sums.VERBS)
        elif question or "? " in request:
            user = phrasing.dress(request, rng, "?")
        else:
            user = phrasing.wrap_imperative(request, rng)
        middle = a.must[0]
        plan = expand("Two steps: first {e}.|First {e}, then the rest.|I start with {e}.", rng, {"e": first})
        step = expand("{e} is {m}. Now {s}.|The result is {m}. Next is {s}.", rng, {"e": first, "m": middle, "s": second})
        say = pick(rng, (b.say, b.say, f"{first} = {middle}, and {second} = {b.must[0]}."))
        self.last = b
        return Turn("chain", user, (Step(plan, (a,)), Step(step, (b,))), self._done(b), say, b.must)

    def _calculation(self, calc: Tool, expression: str) -> Call:
        value = special.evaluate(expression)
        if calc.form == "json":
            number = float(value) if "." in value else int(value)
            result = json.dumps({calc.fields["result"]: number})
        else:
            result = pick(self.rng, (value, value, f"= {value}", f"{expression} = {value}"))
        say = expand(calc.kind.say, self.rng, {"result": value})
        return Call(
            calc, {calc.params["expression"]: expression}, {"expression": expression, "result": value}, result, say, (value,)
        )

    def _list_then_read(self, lister: Tool, reader: Tool) -> Turn:
        rng = self.rng
        folder = str(values.make("folder", rng, self.held_out))
        target = str(values.make("file", rng, self.held_out))
        others = [n for n in texts.names(rng, rng.choice((0, 1, 1, 2, 2, 3, 4))) if n != target]
        stem, _, end = target.rpartition(".")
        slots = {"f": folder, "n": target, "s": stem.replace("_", " ").replace("-", " "), "e": end}
        forms = [BY_NAME]
        if stem and all(not n.endswith("." + end) for n in others):
            forms += [BY_END, BY_END]
        if stem and all(stem not in n for n in others):
            forms += [BY_STEM, BY_STEM]
        if not others:
            forms = [ONLY, ONLY, BY_NAME]
        request = expand(pick(rng, forms), rng, slots)
        entries = [*others, target]
        rng.shuffle(entries)
        listing = bind(lister, rng, self.held_out, {"path": folder}, keep=True)
        if lister.form == "json":
            name = next(iter(lister.fields.values()))
            result = json.dumps({name: entries} if rng.random() < 0.7 else entries, ensure_ascii=False)
        elif lister.kind.key == "list_long":
            result = texts.long_listing(rng, entries)
        else:
            result = pick(rng, ("\n", "\n", ", ", "  ")).join(entries)
        listing = self._without_optional(replace(listing, result=result))
        path = f"{folder.rstrip('/')}/{target}"
        read = self._without_optional(bind(reader, rng, self.held_out, {"path": path}, keep=True))
        question = request.split(" ", 1)[0] in phrasing.QUESTION
        if rng.random() < 0.45:
            user = story(request, rng, not question and not request.startswith("there"))
        else:
            user = phrasing.dress(request, rng, "?") if question else phrasing.wrap_imperative(request, rng)
        plan = expand(
            "First {a}, then {b}.|I list {f} first, then I use {b}.|Two steps: {a}, then {b}.",
            rng,
            {"a": lister.name, "b": reader.name, "f": folder},
        )
        step = expand("The file is {v}. Now {b}.|It is {v}. Next is {b}.", rng, {"v": path, "b": reader.name})
        self.last = read
        return Turn("chain", user, (Step(plan, (listing,)), Step(step, (read,))), self._done(read), read.say, read.must)
