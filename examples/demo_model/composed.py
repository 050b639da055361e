"""Kinds composed from a verb, an everyday thing and a few arguments out of a library, new for every session.

"Find running shoes under 80 euros in size 42": the tool search_shoes(query, max_price, size) has never been written down.
"""

from __future__ import annotations

from random import Random

from examples.demo_model import vocabulary
from examples.demo_model.kinds import Arg, Chain, Kind, arg, kind
from examples.demo_model.values import pick

# key, names, maker, description, ways to say it in a request
LIBRARY = [
    ("max_price", "max_price|price_max|budget|price_limit|maxPrice", "int:2:900", "Highest price|Upper price limit", "under {x} [euros|dollars|bucks]|for less than {x}[ euros| dollars|]|[cheaper|not more] than {x}[ euros|]|below {x} [euros|dollars]|for at most {x}[ euros|]|up to {x} euros"),
    ("min_price", "min_price|price_min|price_from", "int:2:900", "Lowest price", "over {x} [euros|dollars]|for more than {x}[ euros|]|from {x} euros up"),
    ("min_rating", "min_rating|rating|stars|min_stars", "int:1:5", "Minimum rating", "with at least {x} stars|rated {x} or [better|higher]|with {x} stars or more"),
    ("color", "color|colour|paint", "pick:red,blue,green,black,white,yellow,purple,orange,grey,brown,pink", "Color", "in {x}|that [is|are] {x}|[of|in] color {x}"),
    ("size", "size|clothing_size|dimension", "pick:S,M,L,XL,small,medium,large,38,40,42,44", "Size", "in size {x}|of size {x}|size {x}"),
    ("quantity", "quantity|amount|count|qty|how_many|number", "int:2:60", "How many|Quantity", "({x} of them)|, {x} [pieces|items|units]|, quantity {x}|, {x} times|, {x} of them"),
    ("date", "date|day|when|on_date", "date", "Date|Day", "on {x}|for {x}|, {x}"),
    ("time", "time|at|start_time|hour", "clock", "Time", "at {x}|, at {x}|around {x}"),
    ("deadline", "deadline|due|due_date|until|by", "date", "Deadline", "by {x}|until {x}|before {x}|due {x}"),
    ("people", "people|guests|party_size|persons|seats", "int:2:20", "Number of people|Guests", "for {x} [people|guests|persons]|for a party of {x}|for {x} of us"),
    ("place", "city|place|location|where|area|near", "city", "Place|City|Where", "in {x}|near {x}|around {x}|[close to|somewhere in] {x}"),
    ("who", "person|name|for_whom|recipient|customer|for", "someone", "Name of the person|Who it is for", "for {x}"),
    ("author", "author|by|artist|creator|writer", "person", "Author|Who made it", "by {x}|[written|made|created] by {x}"),
    ("language", "language|lang", "language", "Language", "in {x}"),
    ("limit", "limit|max_results|top|count|n", "int:1:25", "Maximum number of results", ", max {x}[ results|]|, only {x}[ results|]|, top {x}|(limit {x})|, not more than {x}"),
    ("sort", "sort|sort_by|order_by|order", "pick:price,date,rating,name,distance,size,popularity,relevance", "Sort order", "sorted by {x}|ordered by {x}|, sort by {x}|by {x}"),
    ("brand", "brand|maker|vendor|company|manufacturer", "invented", "Brand|Maker", "from {x}|made by {x}|by {x}|of the brand {x}"),
    ("year", "year|from_year|since", "int:1950:2030", "Year", "from {x}|from the year {x}|since {x}"),
    ("status", "status|state|filter", "pick:open,closed,active,pending,overdue,done,late,new,available,archived", "Status", "that [is|are] {x}|with status {x}|in state {x}"),
    ("topic", "topic|subject|theme|about", "plain", "Topic", "about {x}|on the topic [of |]{x}|on \"{x}\""),
    ("text", "text|message|note|comment|content|body", "sentence", "Text", "[saying|with the text|with the note|with the message|that says] [\"{x}\"|'{x}'|{x}]|: {x}"),
    ("title", "title|name|label|subject", "title", "Title|Name", "[called|titled|named] [\"{x}\"|'{x}'|{x}]|with the [title|name] [\"{x}\"|{x}]"),
    ("format", "format|type|file_format|output", "pick:pdf,csv,json,xml,html,txt,png,docx", "Format", "as {x}|as a {x} file|in {x} format|in {x}"),
    ("minutes", "minutes|duration|duration_min|length", "int:5:180", "Minutes|Duration", "for {x} minutes|[lasting|of] {x} minutes|, {x} minutes[ long|]"),
    ("hours", "hours|duration_hours|length_hours", "int:2:48", "Hours", "for {x} hours|[lasting|of] {x} hours"),
    ("nights", "nights|days|length_of_stay", "int:2:14", "How long", "for {x} [nights|days]"),
    ("email", "email|to|send_to|contact", "email", "Email address", "[and send it|, send it] to {x}|for {x}|with the email {x}"),
    ("project", "project|project_name|workspace|repo|repository", "slug", "Project", "in project {x}|for [the |]project {x}|in [the |]{x}[ project| repo]|in the [repo|repository|workspace|project] {x}|of [the repo |the project |]{x}"),
    ("team", "team|group|department|squad", "invented", "Team", "for team {x}|of [the |]team {x}|from the {x} team"),
    ("room", "room|where|location", "room", "Room", "in the {x}|for the {x}"),
    ("path", "path|file|source|input_file", "path", "File", "from {x}|with the file {x}|using {x}"),
    ("branch", "branch|ref|target_branch", "branch", "Branch", "on branch {x}|on {x}|from branch {x}"),
    ("env", "environment|env|stage", "pick:staging,production,dev,test,qa", "Environment", "in {x}|on {x}|for {x}"),
    ("country", "country|nation|region", "country", "Country", "in {x}|from {x}"),
    ("percent", "percent|percentage|rate|discount", "int:1:90", "Percent", "with {x}[%| percent]|at {x}[%| percent]"),
    ("reason", "reason|why|cause|justification", "plain", "Reason", "because [of |]{x}|, reason: {x}|, the reason is {x}"),
    ("id", "id|reference|ref|number|code", "id", "Reference|Id", "with [the |]id {x}|number {x}|({x})|, reference {x}"),
    ("priority", "priority|urgency|importance", "pick:low,medium,high,urgent,critical", "Priority", "with {x} priority|, priority {x}|, it's {x} priority"),
    ("category", "category|kind|type|genre|section", "word", "Category", "in [the |]category {x}|of type {x}|of kind {x}"),
    ("phone", "phone|phone_number|tel", "phone", "Phone number", "with phone [number |]{x}|, call {x}|, phone {x}"),
    ("start", "from|origin|start|departure", "city", "Start", "from {x}"), ("end", "to|destination|target|arrival", "city", "Destination", "to {x}"),
    ("tag", "tag|label|keyword", "word", "Tag", "tagged {x}|with the [tag|label] {x}"), ("version", "version|ver", "version", "Version", "version {x}|in version {x}"),
    ("distance", "max_distance|radius|within_km|km", "int:2:90", "Radius in km", "within {x} km|not further than {x} km"), ("weight", "weight|kg|weight_kg", "int:2:90", "Weight in kg", "weighing {x} kg|of {x} kg"),
]  # fmt: skip
# key, result field names, maker, how an answer says it
RESULTS = [
    ("name", "name~title~result~match", "title", "{x}"), ("price", "price~cost~total~amount", "float:1:900:2", "price {x}"), ("id", "id~ref~reference~confirmation~number", "id", "reference {x}"),
    ("count", "count~total~found~hits", "int:0:300", "{x} found"), ("status", "status~state~result", "pick:confirmed,booked,pending,ok,accepted,scheduled,ready,saved,queued,rejected", "status {x}"),
    ("when", "date~when~eta~ready", "date", "{x}"), ("place", "place~location~address~where", "city", "in {x}"), ("who", "person~owner~contact~by", "person", "by {x}"), ("rating", "rating~stars~score", "float:1:5:1", "rated {x}"),
    ("url", "url~link~page", "url", "see {x}"), ("time", "time~at~start", "clock", "at {x}"), ("text", "text~summary~note~message", "sentence", "{x}"), ("left", "remaining~left~available", "int:0:90", "{x} left"),
    ("file", "file~path~saved_to~output", "path", "file {x}"), ("minutes", "minutes~duration~takes", "int:2:200", "{x} minutes"), ("code", "code~pin~token", "id", "code {x}"),
]  # fmt: skip
# verbs of tools, imperative forms, questions and wishes, whether a plural thing reads better
VERBS = [
    ("search|find|list|lookup|get|query|browse|filter", "[find|search for|look for|show me|list|get me|look up|search|give me] [a|some|all|the|any|] {t}|[find|show|get] [me|us] [some|a good|the best|] {t}|[see|check] [if there are any|which|what] {t} [there are|we have|]", "[are there|do you have|do we have|is there] [any|a|some] {t}|I'm looking for [a|some|] {t}|I need [a|some] {t}|which {t} [are there|do we have|can I get]|what {t} [are there|do you have]|I want [a|some] {t}|where can I [get|find|buy] [a|some|] {t}"),
    ("book|reserve|request|schedule|arrange|get", "[book|reserve|get|arrange|organize|request] [me |us |][a|the|our] {t}|[make|set up] a {t} [booking|reservation]", "I [need|want|would like] [to book|to reserve|to get|] a {t}|we'd like a {t}|can I [get|book|have] a {t}"),
    ("create|add|make|new|register|open|insert", "[create|add|make|set up|register|open|start] a [new |]{t}|add [another|a new|one more] {t}", "[I need|we need|there should be] a new {t}|a new {t} please"),
    ("order|buy|purchase|shop_for", "[order|buy|purchase|get] [a|some|the|] {t}|place an order for {t}", "I [want|need|would like] to [buy|order|have] [a|some|] {t}|we [ran out of|are out of|need more] {t}"),
    ("report|log|record|submit|file|track", "[report|log|record|submit|file|register|note] [a|the|my] {t}", "I [had|have|noticed|want to report] a {t}|there was a {t}"),
    ("plan|estimate|compute|calculate|quote|predict", "[plan|estimate|compute|calculate|work out] [a|the|our] {t}|[get|give me] an estimate [of|for] the {t}", "what would [a|the] {t} [cost|take|be]|how [much|long] is [a|the] {t}|what's the {t}"),
    ("send|share|deliver|forward|ship", "[send|deliver|ship|forward|share] [a|the|my] {t}", "I want to send [a|the] {t}|the {t} has to go out"),
    ("check|inspect|test|verify|monitor|get", "[check|inspect|test|verify|look at|see about] the {t}|[tell me|find out] [about|how it is with] the {t}", "[how|what] about the {t}|is the {t} [ok|ready|fine|there]|how is the {t}|any news on the {t}|what's [up|new] with the {t}"),
    ("update|change|set|edit|modify|adjust", "[update|change|set|edit|modify|adjust] [the|my|our] {t}", "the {t} [should|needs to] be changed|I want to change the {t}"),
    ("cancel|delete|remove|drop|clear", "[cancel|delete|remove|drop|clear|get rid of] [the|my|our] {t}", "I don't [need|want] the {t} [anymore|any more]|the {t} is no longer needed"),
    ("start|run|launch|begin|trigger|generate|print", "[start|run|launch|begin|trigger|generate|print|produce] [a|the] {t}", "I need the {t} [started|running|done|now]|time for the {t}"),
]  # fmt: skip
DESCRIPTIONS = "{V} [a {t}|{t}|the {t}|{t}s]|{V} {t} [by|with] {a}|Use it to {v} [a|the] {t}|Lets you {v} {t}s|{V} {t}|{V}s {t}|A tool to {v} [a |]{t}"


def composed_kind(rng: Random, thing: str | None = None) -> Kind:
    """A fresh kind with one to four arguments."""
    verbs, imp, ask = pick(rng, VERBS)
    thing = thing or pick(rng, vocabulary.THINGS)
    if rng.random() < 0.25:
        thing = f"{pick(rng, vocabulary.QUALITIES if rng.random() < 0.4 else vocabulary.THINGS)} {thing}"
    snake = thing.replace(" ", "_")
    verb = pick(rng, verbs.split("|"))
    chosen = rng.sample(LIBRARY, pick(rng, (1, 1, 2, 2, 2, 3, 3, 4)))
    spoken_verb = verb.replace("_", " ")
    args: list[Arg] = []
    said = []
    wanted = rng.random() < 0.3
    if wanted:
        args.append(
            arg(
                "what",
                "query|what|item|product|q|search|name|keyword",
                "thing",
                f"What to {spoken_verb}|{thing.capitalize()}|Item",
            )
        )
    for key, names, maker, desc, say in chosen:
        optional = rng.random() < 0.22
        args.append(arg(key, names, maker, desc, mention=say.replace("{x}", "{%s}" % key) if optional else ""))
        if not optional:
            spoken = pick(rng, names.split("|")).replace("_", " ")
            plainly = (
                f"|with {spoken} {{x}}|, {spoken} {{x}}|, {spoken}: {{x}}|with the {spoken} {{x}}" if rng.random() < 0.4 else ""
            )
            said.append("[" + (say + plainly).replace("{x}", "{%s}" % key) + "]")
    tails = []
    for _ in range(3):
        rng.shuffle(said)
        tails.append(" ".join(said))
    tail = f"[{'|'.join(dict.fromkeys(tails))}]" if said else ""
    subject = "{what}" if wanted else thing + pick(rng, ("", "", "s"))
    join = lambda head: "|".join(f"{part} {tail}" for part in split(head.replace("{t}", subject)))  # noqa: E731
    results = rng.sample(RESULTS, pick(rng, (1, 2, 2, 2, 3)))
    listed = ", ".join(say.replace("{x}", "{r_%s}" % key) for key, _, _, say in results)
    about = "{what}" if wanted else f"the {thing}"
    says = f"{about.capitalize() if not wanted else about}: {listed}.|[Done|Ok|I found it|Here it is|All set|The result]: {listed}.|{listed}."
    out = ";".join(f"r_{key}~" + names + "=" + maker for key, names, maker, _ in results)
    built = kind(
        f"{verb}_{snake}", f"{verb}_{snake}[s|]|{snake}_{verb}|{verb}_{snake}|{verb}" if rng.random() < 0.8 else f"{verb}|{snake}_tool|{verb}_it",
        DESCRIPTIONS.replace("{V}", spoken_verb.capitalize()).replace("{v}", spoken_verb).replace("{t}", thing if not wanted or rng.random() < 0.6 else "items").replace("{a}", chosen[0][0].replace("_", " ")),
        args, imp=join(imp), ask=join(ask), out=out, text=f"{listed}|{listed.replace(', ', '; ')}", say=says, topic=f"to {spoken_verb} {thing}" if not wanted else f"to {spoken_verb} something",
    )  # fmt: skip
    return _plain_fields(built)


ROLES = ("employee", "user", "customer", "member", "patient", "student", "colleague", "player", "driver", "client", "guest", "teacher", "tenant", "person", "contact", "supplier", "staff", "author")  # fmt: skip
AMOUNTS = (
    "vacation day", "point", "credit", "order", "ticket", "task", "meeting", "appointment", "invoice", "sick day", "book", "visit", "lesson", "grade", "hour",
    "message", "device", "project", "child", "car", "key", "bonus", "loan", "account", "course", "flight", "absence", "claim", "follower", "day off",
)  # fmt: skip
FACTS = (
    ("salary", "amount"), ("address", "plain"), ("email", "email"), ("birthday", "date"), ("phone number", "phone"), ("balance", "amount"), ("room", "slug"), ("schedule", "plain"),
    ("next appointment", "date"), ("job title", "plain"), ("manager", "person"), ("score", "number"), ("plan", "word"), ("license plate", "id"), ("start date", "isodate"),
    ("team", "invented"), ("home city", "city"), ("blood type", "word"), ("shift", "word"), ("favorite color", "word"), ("status", "word"), ("last order", "id"), ("desk", "id"),
)  # fmt: skip


def person_chain(rng: Random) -> tuple[Kind, Kind, Chain]:
    """Find somebody by name, then look up something about the id that was found."""
    role = pick(rng, ROLES)
    id_name = pick(rng, (f"{role}_id", "id", f"{role}Id", f"{role}_number", "ref"))
    maker = pick(rng, ("id", "id", "int:1:99999"))
    first = kind(
        f"find_{role}", f"[find|lookup|get|search|resolve|identify]_{role}[_by_name|_id|_record|]|{role}_[lookup|search|finder|id]|who_is",
        f"[Find|Look up|Search|Get] [a|the|an] {role} [record |id |][by|from] [full |]name|[Returns|Gives] the {role} id for a name|{role.capitalize()} directory",
        [arg("name", f"name|full_name|{role}|{role}_name|query|who", "person", f"[Full |]Name of the {role}|{role.capitalize()} name")],
        imp=f"[find|look up|search for] [the {role} |]{{name}}|[get|tell me|find] the {role} [id|number] of {{name}}", ask=f"[what's|what is] the {role} [id|number] of {{name}}|is {{name}} a {role}|do we have a {role} [called|named] {{name}}",
        out=f"ref~{id_name}~id~{role}_id={maker}", text="{ref}|{name}: {ref}|found {ref}|id {ref}", say=f"{{name}} has the {role} id {{ref}}.|The id of {{name}} is {{ref}}.", topic=f"finding a {role}",
    )  # fmt: skip
    on = arg(
        "person",
        f"{role}_id|id|{role}|{role}Id|ref|person_id|{role}_ref",
        maker,
        f"[Id|Number] of the {role}|{role.capitalize()} id",
    )
    if rng.random() < 0.5:
        unit = pick(rng, AMOUNTS)
        many = "children" if unit == "child" else "days off" if unit == "day off" else unit + "s"
        snake = many.replace(" ", "_")
        second = kind(
            f"get_{snake}", f"[get|count|fetch|list|read|check]_{snake}|{snake}[_of|_left|_count|]|{role}_{snake}", f"[Remaining |Number of |Count |Get |List |]{many} [of|for] [a|an] {role}[ id|]|How many {many} [a|an] {role} has",
            [on], imp=f"[get|show|check|tell me] the {many} of {role} {{person}}|[count|check] how many {many} {role} {{person}} has", ask=f"how many {many} does {role} {{person}} have[ left|]|what {many} does {role} {{person}} have",
            out="n~count~left~remaining~total~" + snake + "=int:0:90", text=f"{{n}}|{{n}} {many}|{many}: {{n}}", say=f"{role.capitalize()} {{person}} has {{n}} {many}.|It is {{n}} {many}.|There are {{n}} {many}.", topic=many,
        )  # fmt: skip
        imp = f"[tell me|find out|check|look up] how many {many} {{name}} has[ left|]|[check|get|show] [the {many} of {{name}}|{{name}}'s {many}]|[look up|find] {{name}} and [count|get|check] [the|their] {many}"
        ask = f"how many {many} does {{name}} have[ left|]|how many {many} has {{name}} [got|left]|does {{name}} [still |]have [any |]{many}[ left|]|what {many} does {{name}} have"
    else:
        fact, fact_maker = pick(rng, FACTS)
        snake = fact.replace(" ", "_")
        second = kind(
            f"get_{snake}", f"[get|fetch|read|lookup|show]_{snake}|{snake}[_of|_lookup|]|{role}_{snake}", f"[Get|Return|Look up|The] {fact} of [a|an] {role}[ by id|]|{fact.capitalize()} [for|of] [a|an] {role} id",
            [on], imp=f"[get|show|check|tell me] the {fact} of {role} {{person}}", ask=f"what's the {fact} of {role} {{person}}|which {fact} does {role} {{person}} have",
            out=f"fact~{snake}~value~result={fact_maker}", text=f"{{fact}}|{fact}: {{fact}}", say=f"The {fact} of {role} {{person}} is {{fact}}.|The {fact} is {{fact}}.|It is {{fact}}.", topic=f"the {fact}",
        )  # fmt: skip
        imp = f"[tell me|find out|check|look up|get|show me] [the {fact} of {{name}}|{{name}}'s {fact}]|[look up|find] {{name}} and [tell me|get|check] [the|their] {fact}"
        ask = f"[what's|what is] {{name}}'s {fact}|[what's|what is] the {fact} of {{name}}|which {fact} does {{name}} have|do you know {{name}}'s {fact}|I need {{name}}'s {fact}"
    return first, second, Chain(first.key, "ref", second.key, "person", imp, ask)


def _plain_fields(built: Kind) -> Kind:
    """Drop the internal "r_" from the field names that results show."""
    from dataclasses import replace

    return replace(
        built,
        out=tuple((key, tuple(n for n in names if not n.startswith("r_")), maker) for key, names, maker in built.out),
    )


def split(phrase: str) -> list[str]:
    """Top-level alternatives of a phrase, as text."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(phrase):
        depth += (char == "[") - (char == "]")
        if char == "|" and depth == 0:
            parts.append(phrase[start:at])
            start = at + 1
    return [*parts, phrase[start:]]
