"""Kinds composed from a verb and a noun ("archive_invoice"), so that the model meets thousands of different tools."""

from __future__ import annotations

from functools import cache
from random import Random

from examples.demo_model.kinds import Arg, Chain, Kind, arg, kind
from examples.demo_model.values import pick, words

NOUNS = words(
    "invoice subscription server playlist booking shipment patient student course vehicle printer contract license campaign "
    "lead warehouse candidate pipeline build release experiment dataset cluster node volume snapshot bucket queue alert "
    "incident dashboard report survey coupon cart wallet loan policy claim locker machine robot drone camera gateway driver "
    "batch sample plant tree field member session workspace project channel group team device record document form webhook "
    "token certificate domain backup job worker agent bot model prompt template article post comment photo video album ship "
    "train flight hotel apartment house parcel box pallet meter pump valve battery engine recipe menu table ticket poll quiz "
    "exam lesson book chapter page magazine game level quest badge medal team_member supply_order work_order visitor tenant"
)
ID = "{N}_id|id|{N}|ref|{N}_ref|{N}Id|code|number"

# attribute, names of the result field, maker, extra ways to ask about it
ATTRIBUTES = [
    ("status", "status~state", "pick:active,paused,closed,pending,ready,expired,blocked,new,archived,offline,online", "is {n} {id} [active|ready|ok|done]"),
    ("owner", "owner~owned_by~responsible", "person", "who owns {n} {id}|whose is {n} {id}|who is responsible for {n} {id}"),
    ("price", "price~cost~amount", "float:1:900:2", "how much is {n} {id}|what does {n} {id} cost"),
    ("size", "size~volume~size_mb", "int:1:9000", "how big is {n} {id}|how large is {n} {id}"),
    ("location", "location~place~where", "city", "where is {n} {id}|where can I find {n} {id}"),
    ("due date", "due~due_date~deadline", "isodate", "when is {n} {id} due|until when is {n} {id}"),
    ("version", "version~ver~release", "version", "which version is {n} {id}|what version does {n} {id} have"),
    ("capacity", "capacity~max~limit", "int:2:900", "how much fits in {n} {id}|how many fit in {n} {id}"),
    ("priority", "priority~urgency~level", "pick:low,medium,high,critical,normal", "how urgent is {n} {id}|how important is {n} {id}"),
    ("creation date", "created~created_at~since", "isodate", "when was {n} {id} [created|made|opened]|how old is {n} {id}"),
    ("color", "color~colour~paint", "pick:red,blue,green,black,white,yellow,purple,orange,grey", "what color is {n} {id}|which color does {n} {id} have"),
    ("temperature", "temperature~temp~celsius", "float:-20:90:1", "how hot is {n} {id}|how warm is {n} {id}"),
    ("name", "name~title~label", "title", "what is {n} {id} called|how is {n} {id} named"),
    ("address", "address~url~endpoint", "url", "what's the link [of|to] {n} {id}|where does {n} {id} live online"),
    ("weight", "weight~kg~mass", "float:1:400:1", "how heavy is {n} {id}|how much does {n} {id} weigh"),
    ("progress", "progress~percent~done", "int:0:100", "how far is {n} {id}|how much of {n} {id} is done"),
    ("author", "author~by~creator", "person", "who [made|wrote|created] {n} {id}"),
    ("contact", "contact~email~mail", "email", "whom do I write to about {n} {id}"),
]  # fmt: skip

# verb, its synonyms in requests (base form), participle, tool verbs
ACTIONS = [
    ("cancel", "cancel|call off|abort", "cancelled", "cancel|abort|call_off"), ("delete", "delete|remove|erase|get rid of|drop", "deleted", "delete|remove|drop|destroy"),
    ("archive", "archive|file away|put away", "archived", "archive|store_away"), ("approve", "approve|accept|sign off on|give the ok for", "approved", "approve|accept|sign_off"),
    ("reject", "reject|decline|turn down|refuse", "rejected", "reject|decline|refuse"), ("restart", "restart|reboot|reset", "restarted", "restart|reboot|reset"),
    ("pause", "pause|suspend|put on hold|halt", "paused", "pause|suspend|hold"), ("resume", "resume|continue|pick up|unpause", "resumed", "resume|continue|unpause"),
    ("start", "start|begin|launch|kick off", "started", "start|launch|begin"), ("stop", "stop|end|shut down|kill", "stopped", "stop|end|shutdown"),
    ("lock", "lock|secure|seal", "locked", "lock|secure"), ("unlock", "unlock|open up|release", "unlocked", "unlock|release"),
    ("publish", "publish|make public|release", "published", "publish|make_public"), ("duplicate", "duplicate|copy|clone|make a copy of", "duplicated", "duplicate|clone|copy"),
    ("export", "export|download|save", "exported", "export|download"), ("verify", "verify|check|validate|inspect", "verified", "verify|validate|inspect|check"),
    ("refresh", "refresh|update|sync|reload", "refreshed", "refresh|sync|reload"), ("print", "print|print out", "printed", "print"),
    ("close", "close|finish|wrap up", "closed", "close|finish"), ("reopen", "reopen|open again", "reopened", "reopen|open_again"),
    ("hide", "hide|make invisible", "hidden", "hide|make_private"), ("renew", "renew|extend", "renewed", "renew|extend"),
    ("scan", "scan|examine|analyze", "scanned", "scan|analyze|examine"), ("repair", "repair|fix|mend", "repaired", "repair|fix|mend"),
]  # fmt: skip

# verb with one more argument: key, imp, ask, tool verbs, arg, answer
SETTERS = [
    ("rename", "[rename|retitle] {n} {id} to [\"{x}\"|{x}]|change the name of {n} {id} to [\"{x}\"|{x}]|call {n} {id} \"{x}\"", "{n} {id} should be called [\"{x}\"|{x}]", "rename|set_name|retitle", ("x", "name|new_name|title|to", "title", "New name"), "{n} {id} is now called {x}"),
    ("assign", "[assign|give|hand|hand over|delegate] {n} {id} to {x}|make {x} [responsible for|the owner of] {n} {id}", "{x} should [take|own|handle|get] {n} {id}", "assign|delegate|set_owner|give", ("x", "to|assignee|user|person|owner", "someone", "Who gets it|Person"), "{n} {id} is assigned to {x}"),
    ("tag", "[tag|label|mark] {n} {id} [as|with] {x}|add the [tag|label] {x} to {n} {id}", "{n} {id} needs the [tag|label] {x}", "tag|label|mark|add_label", ("x", "tag|label|mark", "word", "Tag|Label"), "{n} {id} has the tag {x}"),
    ("move", "move {n} {id} to {x}|[transfer|relocate|send] {n} {id} to {x}", "{n} {id} [belongs in|should go to|has to go to] {x}", "move|relocate|transfer", ("x", "to|destination|target|place|location", "city", "Where to|Destination"), "{n} {id} was moved to {x}"),
    ("comment", "[comment on|add a comment to|leave a comment on] {n} {id}: {x}|[write|add] [\"{x}\"|'{x}'] [on|to|as a comment on] {n} {id}", "my comment on {n} {id} is: {x}", "comment|add_comment|annotate", ("x", "text|comment|note|body", "sentence", "The comment|Text"), "your comment is on {n} {id}"),
    ("schedule", "[schedule|plan|set] {n} {id} for {x}|[move|postpone] {n} {id} to {x}|put {n} {id} on {x}", "{n} {id} should [run|happen|be] on {x}", "schedule|plan|set_date|reschedule", ("x", "date|day|when|on", "isodate", "Date"), "{n} {id} is scheduled for {x}"),
    ("rate", "rate {n} {id} with {x}|give {n} {id} {x} [points|stars]|score {n} {id} [as|with] {x}", "{n} {id} deserves {x} [points|stars]", "rate|score|grade", ("x", "score|stars|rating|points", "int:1:10", "Score|Points"), "{n} {id} was rated {x}"),
    ("share", "share {n} {id} with {x}|[send|forward] {n} {id} to {x}|give {x} access to {n} {id}", "{x} needs [access to|to see] {n} {id}", "share|forward|grant_access", ("x", "with|email|to|recipient|user", "email", "Email|With whom"), "{n} {id} is shared with {x}"),
    ("resize", "[resize|scale|grow|set the size of] {n} {id} to {x}|make {n} {id} {x} big", "{n} {id} [needs|should have] size {x}", "resize|scale|set_size", ("x", "size|to|value|new_size", "int:2:900", "New size"), "{n} {id} has size {x} now"),
    ("prioritize", "set the priority of {n} {id} to {x}|give {n} {id} {x} priority|make {n} {id} {x} priority", "{n} {id} [is|has] {x} priority[ now|]", "set_priority|prioritize", ("x", "priority|level|value", "pick:low,medium,high,critical,urgent", "Priority"), "{n} {id} has priority {x}"),
    ("link", "[link|connect|attach|tie] {n} {id} to {x}", "{n} {id} [belongs|is related] to {x}", "link|connect|attach", ("x", "target|to|other|parent", "slug", "What to link to"), "{n} {id} is linked to {x}"),
    ("charge", "charge {x} for {n} {id}|bill {x} on {n} {id}", "{n} {id} costs {x} extra", "charge|bill|add_fee", ("x", "amount|sum|fee", "amount", "Amount"), "{x} was charged for {n} {id}"),
]  # fmt: skip

SUCCESS = "pick:ok,done,success,completed,true"


def _fill(phrase: str, noun: str) -> str:
    return phrase.replace("{N}", noun).replace("{n}", noun.replace("_", " "))


def _id_maker(noun: str) -> str:
    """Some nouns are counted, the others have codes."""
    return "int:1:9999" if len(noun) % 4 == 0 else "id"


def _id_arg(noun: str) -> Arg:
    return arg(
        "id",
        _fill(ID, noun),
        _id_maker(noun),
        _fill("[Id|Number|Reference|Code] of the {n}|Which {n}|The {n}", noun),
    )


@cache
def attribute_kind(noun: str, index: int) -> Kind:
    name, fields, maker, asks = ATTRIBUTES[index]
    field = fields.split("~")[0]
    snake = name.replace(" ", "_")
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"get_{noun}_{snake}", p(f"[get|fetch|read|lookup|show|]_{{N}}_{snake}|{{N}}_{snake}|{snake}_of_{{N}}|[get|show]_{snake}"),
        p(f"[Get|Return|Look up|Read|Show] the {name} of a {{n}}|The {name} of a {{n}}|Tells [the|a] {{n}}'s {name}"),
        [_id_arg(noun)],
        imp=p(f"[get|show me|tell me|look up|check|find|give me] the {name} of [the |]{{n}} {{id}}|check {{n}} {{id}}'s {name}"),
        ask=p(f"[what's|what is] the {name} of [the |]{{n}} {{id}}|which {name} does {{n}} {{id}} have|{asks}|{{n}} {{id}}: what's the {name}|I need the {name} of {{n}} {{id}}"),
        out=f"{fields}={maker}", text=p(f"{{{field}}}|{name}: {{{field}}}|{{n}} {{id}}: {{{field}}}"),
        say=p(f"The {name} of {{n}} {{id}} is {{{field}}}.|{{n}} {{id}} has the {name} {{{field}}}.|It is {{{field}}}."), topic=p(f"the {name} of a {{n}}"),
    )  # fmt: skip


@cache
def details_kind(noun: str, i: int, j: int) -> Kind:
    (a, af, am, aq), (b, bf, bm, bq) = ATTRIBUTES[i], ATTRIBUTES[j]
    fa, fb = af.split("~")[0], bf.split("~")[0]
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"get_{noun}", p("[get|fetch|show|lookup|find|load|describe]_{N}[_details|_info|]|{N}_[details|info|lookup]"),
        p("[Get|Show|Load|Fetch|Look up] [a|the details of a|information about a] {n}[ by id|]|Details of a {n}|Everything about one {n}"),
        [_id_arg(noun)],
        imp=p(f"[show|get|look up|open|pull up|describe|fetch] [me |][the |]{{n}} {{id}}|[tell me about|give me the details of|get info on] {{n}} {{id}}|[tell me|get] the {a} and [the |]{b} of {{n}} {{id}}"),
        ask=p(f"what do we know about {{n}} {{id}}|{aq}|{bq}|what's the {a} of {{n}} {{id}}|what are the details of {{n}} {{id}}|which {b} does {{n}} {{id}} have"),
        out=f"{af}={am};{bf}={bm}", text=p(f"{a} {{{fa}}}, {b} {{{fb}}}|{{n}} {{id}}: {{{fa}}} / {{{fb}}}"),
        say=p(f"{{n}} {{id}}: {a} {{{fa}}}, {b} {{{fb}}}.|The {{n}} {{id}} has {a} {{{fa}}} and {b} {{{fb}}}."), topic=p("a {n}"),
    )  # fmt: skip


@cache
def action_kind(noun: str, index: int) -> Kind:
    verb, ways, done, tool_verbs = ACTIONS[index]
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"{verb}_{noun}", p(f"[{tool_verbs}]_{{N}}|{{N}}_[{tool_verbs}]|do_{verb}|[{tool_verbs}]"),
        p(f"{verb.capitalize()} a {{n}}|{verb.capitalize()}s the given {{n}}|Use this to {verb} a {{n}}|{verb.capitalize()} one {{n}} by its id"),
        [_id_arg(noun)],
        imp=p(f"[{ways}] [the |]{{n}} {{id}}|[{ways}] {{n}} [number |]{{id}}|[{ways}] [{{n}} {{id}}|{{id}}]"),
        ask=p(f"{{n}} {{id}} [should be|must be|has to be|needs to be|can be] {done}|I want {{n}} {{id}} {done}|let's get {{n}} {{id}} {done}"),
        out=f"status~result~ok={SUCCESS};at~time~when=clock", text=p(f"{{status}}|{{n}} {{id}} {done}|{{status}} at {{at}}|{done}"),
        say=p(f"{{n}} {{id}} is {done}.|The {{n}} {{id}} was {done}.|Done: {{n}} {{id}} is {done}."), topic=p(f"to {verb} a {{n}}"),
    )  # fmt: skip


@cache
def setter_kind(noun: str, index: int) -> Kind:
    verb, imp, ask, tool_verbs, extra, say = SETTERS[index]
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"{verb}_{noun}", p(f"[{tool_verbs}]_{{N}}|{{N}}_[{tool_verbs}]|[{tool_verbs}]"),
        p(f"{verb.capitalize()} a {{n}}|Use this to {verb} a {{n}}|{verb.capitalize()}s one {{n}}"),
        [_id_arg(noun), arg(*extra)], imp=p(imp), ask=p(ask),
        out=f"status~result~ok={SUCCESS};rev~revision~change=int:2:99", text="{status}|ok, revision {rev}|{status} ({rev})",
        say=p(f"Done, {say}.|Ok: {say}.|{say[0].upper() + say[1:]}."), topic=p(f"to {verb} a {{n}}"),
    )  # fmt: skip


@cache
def create_kind(noun: str) -> Kind:
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"create_{noun}", p("[create|add|new|make|register|open]_{N}|{N}_[create|new|add]"), p("[Create|Add|Register|Make] a [new |]{n}|Adds a {n}"),
        [arg("title", p("name|title|{N}_name|label"), "title", p("Name of the {n}|Title"))],
        imp=p("[create|add|make|set up|register] a [new |]{n} [called|named|with the name] [\"{title}\"|'{title}'|{title}]|[create|add] the {n} \"{title}\""),
        ask=p("[I need|we need|I'd like] a [new |]{n} [called|named] [\"{title}\"|{title}]"), out="ref~id~key=id;status~state=pick:created,ok,new", text="{ref}|created {ref}|{status}: {ref}",
        say=p("The {n} {title} was created ({ref}).|Created {n} {ref}: {title}."), topic=p("a new {n}"),
    )  # fmt: skip


@cache
def find_kind(noun: str) -> Kind:
    p = lambda text: _fill(text, noun)  # noqa: E731
    return kind(
        f"find_{noun}", p("[find|search|lookup|locate]_{N}[_by_name|_id|]|{N}_[search|finder|lookup]|search_{N}s"),
        p("[Find|Search|Look up] a {n} by name|Find the id of a {n}|[Returns|Gives] the id of a named {n}"),
        [arg("title", p("name|query|title|{N}_name|q"), "invented", p("Name of the {n}|Name to look for"))],
        imp=p("[find|search for|look up|look for|locate] the {n} [called |named ||]{title}|[get|find] the id of the {n} {title}|find {n} {title}"),
        ask=p("[what's|what is] the id of the {n} {title}|do we have a {n} [called|named] {title}|which id does the {n} {title} have"),
        out=f"ref~id~key={_id_maker(noun)}", text=p("{ref}|found {ref}|{n} {title}: {ref}"), say=p("The {n} {title} has the id {ref}.|{title} is {n} {ref}.|I found {title}: {ref}."), topic=p("finding a {n}"),
    )  # fmt: skip


@cache
def count_kind(noun: str) -> Kind:
    p = lambda text: _fill(text, noun)  # noqa: E731
    states = "active,open,closed,new,failed,blocked,late,old,pending,archived"
    return kind(
        f"count_{noun}s", p("[count|list|number_of|get]_{N}s|{N}_count|count_{N}"), p("[Count|Number of|How many] {n}s [with a status|in a state|]|Counts {n}s by status"),
        [arg("state", "status|state|filter|kind", f"pick:{states}", "Status to count|State")],
        imp=p("count [the|all|our] {state} {n}s|[tell me|find out] how many {state} {n}s [there are|we have]"), ask=p("how many {state} {n}s [are there|do we have|exist]|what's the number of {state} {n}s"),
        out="count~total~n=int:0:999", text=p("{count}|{count} {n}s"), say=p("There are {count} {state} {n}s.|We have {count} {state} {n}s."), topic=p("a count of {n}s"),
    )  # fmt: skip


def random_kind(rng: Random, noun: str | None = None) -> Kind:
    noun = noun or pick(rng, NOUNS)
    r = rng.random()
    if r < 0.22:
        return attribute_kind(noun, int(rng.random() * len(ATTRIBUTES)))
    if r < 0.36:
        i, j = rng.sample(range(len(ATTRIBUTES)), 2)
        return details_kind(noun, i, j)
    if r < 0.6:
        return action_kind(noun, int(rng.random() * len(ACTIONS)))
    if r < 0.78:
        return setter_kind(noun, int(rng.random() * len(SETTERS)))
    if r < 0.86:
        return create_kind(noun)
    if r < 0.95:
        return find_kind(noun)
    return count_kind(noun)


def random_chain(rng: Random) -> tuple[Kind, Kind, Chain]:
    """Find something by name, then act on the id that was found."""
    noun = pick(rng, NOUNS)
    n = noun.replace("_", " ")
    first = find_kind(noun)
    r = rng.random()
    if r < 0.4:
        index = int(rng.random() * len(ATTRIBUTES))
        second = attribute_kind(noun, index)
        name = ATTRIBUTES[index][0]
        imp = f"[get|tell me|look up|find] the {name} of the {n} [called |named |]{{title}}|[find|look up] the {n} {{title}} and [tell me|get|check] its {name}"
        ask = f"[what's|what is] the {name} of the {n} [called |named |]{{title}}|which {name} does the {n} {{title}} have"
    elif r < 0.75:
        index = int(rng.random() * len(ACTIONS))
        second = action_kind(noun, index)
        ways, done = ACTIONS[index][1], ACTIONS[index][2]
        imp = f"[{ways}] the {n} [called |named |]{{title}}|[find|look up] the {n} {{title}} and {ACTIONS[index][0]} it"
        ask = f"the {n} {{title}} [should be|must be|has to be] {done}|I want the {n} {{title}} {done}"
    else:
        index = int(rng.random() * len(SETTERS))
        second = setter_kind(noun, index)
        swap = lambda text: _fill(text, noun).replace(f"{n} {{id}}", f"the {n} {{title}}")  # noqa: E731
        imp, ask = swap(SETTERS[index][1]), swap(SETTERS[index][2])
    return first, second, Chain(first.key, "ref", second.key, "id", imp, ask)
