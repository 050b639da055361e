"""Sessions with small toolboxes of short names, asked for directly, indirectly, sloppily, or by reference to a sentence before.

"We take train RE 4 in an hour. What's its status?": what a call needs often stands outside the sentence that asks. Most
toolboxes hold a tool that could take the result of another, and most requests are satisfied by one call.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from examples.demo_model import composed, generic, phrasing, sloppy, values
from examples.demo_model import vocabulary as v
from examples.demo_model.dialogues import Step, Turn, Writer
from examples.demo_model.everyday import NOTHING, Everyday, story
from examples.demo_model.grammar import expand
from examples.demo_model.kinds import Kind
from examples.demo_model.kinds_plain import CHAINS, NOUNS, PLAIN, RIVALS
from examples.demo_model.tools import Tool, make_tool
from examples.demo_model.values import pick

CLOSED = ("moment", "wordcalc", "day", "room", "currency", "unit", "language")  # makers whose values nobody quotes
FIRST_MARK = 0xE000  # values are private-use characters while the words around them are changed
FREE = {
    "remind",
    "event",
    "todo",
    "note",
    "mail",
    "text_message",
    "alarm",
    "web_search",
    "news",
    "translate",
    "book_table",
}  # may end with free text
ABOUT = (
    "[somebody|{p}|my boss|a customer|my sister|a colleague|the client] [asked|told|wrote to|called] me about [the |]{n} {x}|I have a question about {n} {x}|this is about {n} {x}|it's about {n} {x}|"
    "I'm looking at {n} {x}[ right now|]|{p} mentioned {n} {x}[ yesterday| this morning|]|I [need|want] [help|some information|to know something] [with|about] {n} {x}|"
    "{n} {x} [worries me|came up again|is on my mind|is the one I mean]|we [are talking|talked] about {n} {x}|you [know|remember] {n} {x}|there is [this|the] {n} {x}|let's [talk about|look at] {n} {x}"
)
ABOUT_OF = {
    "city": "[next week|tomorrow|soon|in {m}|on {d}|this weekend] [I will|we will|I'll|we'll|I want to|we] [travel|fly|go|drive] to {x}[ with {p}| with my parents| for work| for a few days|]|my [sister|brother|aunt|best friend|son] [lives in|moved to|is in] {x}|I'm [in|on my way to|staying in] {x} [now|right now|today|this week]|our [meeting|office|client|hotel] is in {x}|{p} invited me to {x}|we [plan|booked] a trip to {x}",
    "file": "[our build|the {t}|something|the import|the server] [broke|failed|stopped|crashed] [last night|yesterday|this morning|] and [I believe|I think|{p} says|I guess] the reason is in {x}|{p} [sent|gave|left] me {x}|the [log|report|list|text] is in {x}|{p} wrote [everything|it|the numbers] into {x}|I [found|have|got] a file {x} [here|on my disk|in the project|]|everything is written in {x}",
    "folder": "{p} put [everything|the files|it all] [into|in] {x}|my [files|photos|documents] are in {x}|we keep the {t}s in {x}|I [made|found] a folder {x}",
    "person": "I [met|lost the card of|work with|want to reach|have to call|am looking for|have to talk to] {x}[ tomorrow| today|]|{x} is [new here|on holiday|waiting for me|our new colleague|my neighbor]|[do you know|there is] {x} [in our company|from accounting|from the {t} team]|I [lost|can't find] my contacts and [need|want] to reach {x}",
    "train": "[we|I] [want to|will|have to|would like to] take {n} {x} [in an hour|today|tomorrow|on {d}|]|I'm [sitting in|waiting for|on] {n} {x}|{p} [arrives|comes|is coming] [with|on|by] {n} {x}",
    "country": "we [learn|talk] about {x} at school|my [wife|friend|boss] comes from {x}|I'm [writing|reading] [something|an article|a book] about {x}",
    "word": "[I read|somebody used|there was|{p} said|I heard] the word {x}[ today| yesterday| in a book|]|my teacher used the word {x}",
    "email": "I [got|have] a mail from {x}|{x} wrote to us [yesterday|again|]|[a message|a complaint|a mail] came from {x}",
}
ABOUT_OF |= {"flight": ABOUT_OF["train"], "address": ABOUT_OF["email"], "place": ABOUT_OF["city"], "town": ABOUT_OF["city"]}
PEOPLE, PLACES = {"person"}, {"city", "place", "town"}


@cache
def pointed(phrase: str, key: str, nouns: tuple[str, ...]) -> str:
    """The phrase without nouns before the slot: "[the |]train {train}" as "{train}". Choices that only hold nouns go too."""
    words = "|".join((*nouns, "part", "units?", "user", "account", "client", "server"))
    choice = rf"(?:\[(?:(?:the|my|a|our) )?(?:(?:{words}) ?\|?|(?:the|my|our|all) ?\|?|the (?:{words}) ?\|?|\|)*\] ?)*"
    plain = rf"(?:the |my |our )?(?:(?:{words}) )?"
    return re.sub(choice + plain + r"\{%s\}" % key, "{%s}" % key, phrase)


class Plain(Everyday):
    """Writes sessions of this kind; see the module."""

    def _tools(self, count: int | None) -> list[Tool]:
        rng = self.rng
        style = {
            "case": pick(rng, ("snake",) * 9 + ("camel", "dash")), "prefix": "", "titles": False, "closed": rng.random() < 0.15,
            "describe": 0.4 + 0.6 * rng.random(), "returns": False, "arg_case": pick(rng, ("snake",) * 8 + ("camel",)),
        }  # fmt: skip
        goal = count if count is not None else pick(rng, (0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 5, 6))
        kinds: list[Kind] = []
        if goal >= 2 and rng.random() < 0.4:
            chain = pick(rng, CHAINS)
            kinds += [PLAIN[chain.first], PLAIN[chain.second]]
        elif goal >= 2 and rng.random() < 0.12:
            kinds += [PLAIN[pick(rng, ("ls", "ls", "find_in_folder"))], PLAIN["open_file"]]
        keys = list(PLAIN)
        while len(kinds) < goal:
            r = rng.random()
            kind = PLAIN[pick(rng, keys)] if r < 0.8 else composed.composed_kind(rng) if r < 0.92 else generic.random_kind(rng)
            have = {k.key for k in kinds}
            if kind.key in have or any(kind.key in group and have & group for group in RIVALS):
                continue
            kinds.append(kind)
        taken: set[str] = set()
        made = {kind.key: make_tool(kind, rng, self.held_out, style, taken) for kind in kinds}
        self.chains += [(made[c.first], made[c.second], c) for c in CHAINS if c.first in made and c.second in made]
        tools = list(made.values())
        rng.shuffle(tools)
        return tools

    # -- requests ------------------------------------------------------------------------------------------------

    def _request(self, kind: Kind, slots: dict[str, str], imp: str, ask: str, wrap: bool = True) -> str:
        rng = self.rng
        imperative = bool(imp) and (not ask or rng.random() < 0.5)
        phrase = imp if imperative else ask
        lead = ""
        if wrap and rng.random() < 0.2:
            phrase, lead = self._pointing(kind, phrase, slots)
        marks: dict[str, str] = {}
        masked: dict[str, str] = {}
        for key, value in slots.items():
            marks[chr(FIRST_MARK + len(marks))] = value
            masked[key] = chr(FIRST_MARK + len(marks) - 1)
            if kind.key in PLAIN and not key.startswith("+"):
                masked["@" + key] = sloppy.preposition(value) + masked[key]
        text = expand(phrase, rng, masked)
        if wrap and not lead and imp and ask and kind.key not in FREE and rng.random() < 0.04:  # said twice, in two ways
            other = expand(ask if imperative else imp, rng, masked)
            first, second = (other, text) if imperative else (text, other)
            text, imperative = f"{first}? {second[:1].upper()}{second[1:]}", False
        for key, words in slots.items():
            if key.startswith("+"):  # its value is inside and was not masked
                text = text.rstrip("?.! ") + ("" if words.startswith(",") else " ") + masked[key]
        if kind.key == "compute":  # its phrases are of both sorts
            imperative = slots["expression"].split(" ", 1)[0].lower() not in phrasing.QUESTION
        if lead:
            for key, mark in masked.items():
                lead = lead.replace("{%s}" % key, mark)
            text = self._after(lead, text, imperative, marks)
        elif wrap and rng.random() < 0.3:
            text = story(text, rng, imperative, kind.key in FREE)
        elif wrap:
            text = phrasing.wrap_imperative(text, rng) if imperative else phrasing.wrap_question(text, rng)
        if wrap and rng.random() < 0.25:
            text = sloppy.sloppy(text, rng)
        quotable = {
            masked[a.key]
            for a in kind.args
            if a.type == "string" and a.key in masked and a.maker not in CLOSED and not a.maker.startswith("pick:")
        }
        return sloppy.unmask(text, marks, quotable, rng)

    def _pointing(self, kind: Kind, phrase: str, slots: dict[str, str]) -> tuple[str, str]:
        """(the phrase with a pronoun for one value, a sentence that names the value) or the phrase and nothing."""
        rng = self.rng
        able = [
            a.key for a in kind.args if NOUNS.get((kind.key, a.key)) and "{%s}" % a.key in phrase and "\n" not in slots[a.key]
        ]
        if not able or kind.key in FREE:
            return phrase, ""
        key = pick(rng, able)
        nouns = NOUNS[kind.key, key]
        noun = pick(rng, nouns)
        group = nouns[0]
        about = ABOUT_OF.get(group, ABOUT)
        if group not in PEOPLE | PLACES and rng.random() < 0.25:
            about = ABOUT
        lead = about.replace("{x}", "{%s}" % key)
        words = {
            "n": noun,
            "p": values.first_name(rng),
            "t": pick(rng, v.THINGS),
            "d": pick(rng, values.DAYS),
            "m": pick(rng, ("March", "June", "August", "autumn", "spring")),
        }
        lead = expand(lead.replace("{%s}" % key, "\\{%s\\}" % key), rng, words)
        phrase = pointed(phrase, key, nouns)
        pronoun = (
            f"[that {noun}|this {noun}|the {noun}|that {noun}]"
            if group in PEOPLE | PLACES | {"word"}
            else f"[that {noun}|this {noun}|it|it|the {noun}]"
        )
        slot = "{%s}" % key
        if group in PLACES:
            phrase = re.sub(
                r"(?:\bin|\bat|\[in\|at\|for\]|\[at\|in\]|\[in\|for\]|\[in\|at\]) " + re.escape(slot),
                "[there|there|in that %s]" % noun,
                phrase,
            )
        owner = "[their|his|her]" if group in PEOPLE else "its"
        phrase = phrase.replace(slot + "'s", owner).replace(slot, pronoun)
        return phrase, lead

    def _after(self, lead: str, text: str, imperative: bool, marks: dict[str, str]) -> str:
        rng = self.rng
        big = lambda words: words[:1].upper() + words[1:]  # noqa: E731
        question = not imperative and text.split(" ", 1)[0].lower() in phrasing.QUESTION
        if imperative and rng.random() < 0.5:
            text = (
                pick(
                    rng,
                    ("please ", "can you ", "could you ", "please ", "could you please ", "I'd like you to ", "I need you to "),
                )
                + text
            )
            question = text.startswith(("can", "could"))
        mark = "?" if question and rng.random() < 0.92 else "."
        joiner = pick(rng, (". ", ". ", ". ", ". ", ", so ", " - ", "; ", ". So ", "! ", ": "))
        made = lead + joiner + (big(text) if joiner in (". ", "! ") else text) + mark
        return big(made) if rng.random() < 0.85 else made

    # -- turns ---------------------------------------------------------------------------------------------------

    def _find(self, *keys: str) -> Tool | None:
        return super()._find(
            *keys,
            *(["compute"] if "calc" in keys else []),
            *(["ls"] if "list_folder" in keys else []),
            *(["open_file"] if "read_text" in keys else []),
        )

    def _turn(self) -> Turn:
        rng = self.rng
        if not self.session.tools:
            return Writer._turn(self)
        lister, reader, calc = self._find("list_folder"), self._find("read_text"), self._find("calc")
        if self.chains and rng.random() < 0.24:
            return self._chain()
        if lister and reader and rng.random() < 0.14:
            return self._list_then_read(lister, reader)
        if calc and rng.random() < 0.05:
            return self._two_steps(calc)
        r = rng.random()
        if r < 0.1:
            return self._both()
        if r < 0.17:
            return self._parallel()
        if r < 0.22:
            return self._talk()
        if r < 0.24:
            return self._abilities()
        if r < 0.26:
            return self._memory()
        if r < 0.3 and self.last and self.last.tool.kind.follow:
            return self._follow()
        return self._single(fail=rng.random() < 0.06)

    def _cannot(self) -> Turn:
        return Writer._cannot(self) if not self.session.tools else self._single(fail=False)

    def _single(self, fail: bool) -> Turn:
        turn = Writer._single(self, fail)
        (step,) = turn.steps
        if fail or self.rng.random() > 0.025:
            return turn
        call = replace(step.calls[0], result=pick(self.rng, NOTHING))
        answer = expand("Nothing was found.|I found nothing.|The tool found nothing.|There is no result.", self.rng)
        return replace(turn, steps=(Step(step.thinking, (call,)),), thinking="Nothing was found.", answer=answer, must=())

    def _follow(self) -> Turn:
        return Writer._follow(self) if self.last and self.last.tool.kind.key != "compute" else self._single(fail=False)
