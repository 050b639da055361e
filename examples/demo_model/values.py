"""Values that dialogues talk about: names, places, paths, ids, numbers, quotations.

Every value that a model must copy is checked against a split by hash, so that evaluation uses only values that
training never showed. Small closed sets (units, colours, yes/no) are exempt: they are vocabulary, not values.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from zlib import crc32

from examples.demo_model import vocabulary as v

HELD_OUT_SHARE = 8  # one value in eight belongs to evaluation
Maker = Callable[[Random], object]


def is_held_out(text: str) -> bool:
    """True when this exact text belongs to the evaluation split."""
    return crc32(text.encode()) % HELD_OUT_SHARE == 0


def words(text: str) -> list[str]:
    return text.split()


CITIES = words(
    "Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Helsinki Warsaw Athens Zurich Geneva Munich Hamburg "
    "Lyon Milan Naples Turin Porto Seville Valencia Bilbao Krakow Gdansk Budapest Belgrade Sofia Bucharest Istanbul Ankara "
    "Cairo Lagos Nairobi Accra Dakar Tunis Casablanca Johannesburg Durban Mumbai Delhi Chennai Pune Kolkata Dhaka Karachi "
    "Lahore Tehran Baghdad Dubai Doha Riyadh Beirut Jerusalem Tokyo Osaka Kyoto Sapporo Seoul Busan Beijing Shanghai Taipei "
    "Hanoi Bangkok Manila Jakarta Singapore Sydney Melbourne Perth Brisbane Auckland Wellington Boston Chicago Denver Seattle "
    "Portland Austin Dallas Houston Atlanta Miami Tampa Detroit Cleveland Phoenix Tucson Toronto Montreal Ottawa Vancouver "
    "Calgary Lima Quito Santiago Bogota Caracas Montevideo Havana Reykjavik Tallinn Riga Vilnius Kyiv Minsk Tbilisi Yerevan "
    "Antwerp Ghent Bruges Rotterdam Utrecht Leipzig Dresden Cologne Bergen Malmo Aarhus Tampere Turku Bristol Leeds Glasgow"
)
CITIES += [
    "New York",
    "Los Angeles",
    "San Francisco",
    "Buenos Aires",
    "Mexico City",
    "Cape Town",
    "Hong Kong",
]
CITIES += [
    "São Paulo",
    "Zürich",
    "Córdoba",
    "Málaga",
    "Malmö",
    "Kraków",
    "Łódź",
    "Tromsø",
    "Düsseldorf",
    "Besançon",
]
CITIES += [
    "Rio de Janeiro",
    "New Delhi",
    "Tel Aviv",
    "San Diego",
    "Las Vegas",
    "Salt Lake City",
    "Kuala Lumpur",
]
COUNTRIES = words(
    "France Germany Spain Italy Portugal Norway Sweden Finland Denmark Poland Austria Hungary Greece Turkey Egypt Kenya "
    "Nigeria Ghana Morocco India Pakistan China Japan Vietnam Thailand Indonesia Australia Canada Mexico Brazil Argentina "
    "Chile Peru Colombia Cuba Iceland Ireland Scotland Estonia Latvia Ukraine Romania Bulgaria Croatia Slovenia Nepal"
)
FIRST = words(
    "Anna Ben Carla David Elena Frank Grace Hugo Ines Jonas Karin Leo Maria Nina Oscar Paula Quentin Rosa Sam Tara Uma "
    "Victor Wendy Xavier Yara Zoe Alice Bob Carol Dan Emma Felix Gina Henry Iris Jack Kate Liam Mia Noah Olivia Peter Ruth "
    "Simon Tom Ursula Vera Will Amir Bilal Chen Deepa Emeka Fatima Goran Hana Ivan Jamila Kofi Lena Mei Nadia Omar Priya "
    "Ravi Sana Tariq Yusuf Zainab José Zoë René Chloé Jürgen Søren Łukasz Renée Sofía Andrés Müge Åsa Björn Noémie"
)
LAST = words(
    "Smith Jones Brown Taylor Wilson Evans Walker Wright Green Hall Wood Clarke Hughes Edwards Cooper Ward Turner Parker "
    "Garcia Lopez Martin Silva Santos Costa Rossi Bianchi Romano Weber Fischer Becker Schulz Novak Kowalski Nowak Petrov "
    "Ivanov Haddad Khan Patel Singh Sharma Chen Wang Tanaka Sato Suzuki Kim Park Nguyen Tran Okafor Mensah Diallo Larsen "
    "Hansen Nielsen Berg Lindqvist Virtanen Murphy Kelly Byrne Martínez Gómez Núñez Šimić Öztürk Dvořák Håkansson Lefèvre"
)
ONSETS = words("b c d f g h j k l m n p r s t v w z br cl dr fl gr kr pl pr qu sh st th tr ch sk sp")
VOWELS = words("a e i o u a e i o ai ea io ou ee")
CODAS = ["", "", "", "n", "r", "l", "s", "m", "x", "nd", "rt", "ck", "st", "th", "k", "d", "ne"]
NOUNS = words(
    "apple anchor arrow basket beacon bridge bucket button cable camera candle canvas carbon castle cedar circle cloud "
    "comet copper coral cotton crystal delta desert diamond dragon eagle ember engine falcon feather field flame forest "
    "garden ginger glacier guitar hammer harbor hazel hill honey island ivory jacket jasmine jungle kettle ladder lake "
    "lantern laurel lemon lion maple marble meadow mirror moon mountain needle nickel north ocean olive onyx orange orbit "
    "otter panda paper pearl pebble pepper piano pine planet pocket prairie quartz rabbit raven ribbon river rocket saddle "
    "sailor saffron sapphire shadow shell silver solar spark spice star stone storm summit sunset table tiger timber tower "
    "tulip tunnel valley velvet violet walnut water whale willow window winter wolf yellow zebra alpha beta gamma omega"
)
VERBISH = words(
    "build check clean compile cover deploy draft encode export fetch filter format index install launch lint load merge "
    "migrate mirror monitor notify optimize package parse patch plan publish query record refresh release render report "
    "retry review route sample scan schedule search send serve sort split start store stream submit sync tag test trace "
    "train transfer transform update upload validate verify watch write"
)
ADJ = words(
    "amber ancient basic bold brave bright broken busy calm central clever cold cosmic daily damp deep dry early empty "
    "fast fresh gentle giant golden grand green happy heavy hidden hollow icy idle jolly kind large late lazy light little "
    "local loud lucky main misty modern narrow new noisy old open pale plain polite proud public purple quick quiet rapid "
    "rare red remote round royal rusty secret sharp shiny short silent simple sleepy slow small smooth soft solid spare "
    "spicy steady stormy strange strong sunny sweet swift tall tame tiny upper urban vast warm weekly white wild wise young"
)
DIRS = words(
    "src lib app docs tests data config scripts tools assets public server client core api models utils notes logs backup "
    "build dist examples internal shared web infra reports home var etc tmp projects packages services modules"
)
EXTS = words("py js ts rs go c cpp h md txt json yaml toml ini csv log sh html css sql xml cfg lock env java rb")
TOPICS = [
    "machine learning", "climate change", "electric cars", "space travel", "renewable energy", "football", "the stock market",
    "quantum computing", "gardening", "coffee brewing", "ancient history", "jazz music", "remote work", "chess openings",
    "healthy breakfast ideas", "travel insurance", "bread baking", "solar panels", "home security", "tax rules",
    "interest rates", "python decorators", "database indexes", "memory leaks", "rust lifetimes", "sourdough starters",
    "winter tires", "marathon training", "medieval castles", "bird migration", "wine regions", "vector databases",
    "retry policies", "unit testing", "container networking", "password hashing", "green tea", "sleep quality",
]  # fmt: skip
DISHES = words("pasta sushi tacos curry ramen pizza burgers salad dumplings paella falafel pho steak noodles soup waffles")
COMMANDS = [
    "ls -la", "pwd", "whoami", "uname -a", "df -h", "git status", "git log --oneline", "git diff", "make test", "make build",
    "npm test", "npm run build", "pytest -q", "cargo build", "cargo test", "go test ./...", "docker ps", "ps aux", "uptime",
    "free -m", "date", "hostname", "env", "pip list", "python --version", "node -v", "git branch -a", "make clean", "make lint",
]  # fmt: skip
NONASCII = [
    "Привет мир", "Москва", "Київ", "東京", "北京", "大阪", "서울", "안녕하세요", "Ελλάδα", "Αθήνα", "שלום", "مرحبا", "दिल्ली",
    "naïve café", "smörgåsbord", "crème brûlée", "piñata", "Größe", "übermäßig", "façade", "déjà vu", "Ærøskøbing", "jalapeño",
    "señor", "garçon", "Straße", "año nuevo", "coração", "mañana", "œuvre", "žluťoučký", "dzień dobry", "żółw", "göteborg",
    "ok 👍", "🎉 party", "10 €", "5 £", "20 °C", "π", "→ next", "½ cup", "naïveté", "São João", "Île-de-France", "Curaçao",
]  # fmt: skip


def pick(rng: Random, items):
    return items[int(rng.random() * len(items))]


def syllables(rng: Random, low: int = 2, high: int = 3) -> str:
    return "".join(
        pick(rng, ONSETS) + pick(rng, VOWELS) + (pick(rng, CODAS) if rng.random() < 0.4 else "")
        for _ in range(rng.randint(low, high))
    )


def invented(rng: Random) -> str:
    return syllables(rng).capitalize()


def letters(rng: Random, low: int, high: int) -> str:
    return "".join(pick(rng, "abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def digits(rng: Random, low: int, high: int) -> str:
    return pick(rng, "123456789") + "".join(pick(rng, "0123456789") for _ in range(rng.randint(low, high) - 1))


def alnum(rng: Random, low: int, high: int) -> str:
    return "".join(pick(rng, "abcdefghijklmnopqrstuvwxyz0123456789") for _ in range(rng.randint(low, high)))


def city(rng: Random) -> str:
    r = rng.random()
    if r < 0.6:
        return pick(rng, CITIES)
    if r < 0.9:
        return invented(rng)
    return f"{pick(rng, ('San', 'Port', 'New', 'Saint', 'Lake', 'North', 'Upper', 'El', 'Fort'))} {invented(rng)}"


def country(rng: Random) -> str:
    return pick(rng, COUNTRIES) if rng.random() < 0.8 else invented(rng) + "ia"


def first_name(rng: Random) -> str:
    return pick(rng, FIRST) if rng.random() < 0.6 else invented(rng)


def person(rng: Random) -> str:
    last = pick(rng, LAST) if rng.random() < 0.5 else invented(rng)
    r = rng.random()
    if r < 0.03:
        return f"{first_name(rng)} O'{invented(rng)}"
    if r < 0.06:
        return f"{first_name(rng)} {last}-{invented(rng)}"
    return f"{first_name(rng)} {last}"


def someone(rng: Random) -> str:
    return person(rng) if rng.random() < 0.6 else first_name(rng)


def username(rng: Random) -> str:
    base = (syllables(rng) if rng.random() < 0.5 else pick(rng, FIRST).lower()).replace("'", "")
    return pick(rng, ("{}", "{}{d}", "{}_{w}", "{}.{w}", "{}-{w}", "{w}_{}")).format(
        base, d=digits(rng, 1, 3), w=pick(rng, NOUNS)
    )


def word(rng: Random) -> str:
    r = rng.random()
    if r < 0.25:
        return pick(rng, pick(rng, (v.THINGS, v.THINGS, v.ACTIONS, v.QUALITIES)))
    lists = (NOUNS, NOUNS, ADJ, VERBISH)
    return pick(rng, pick(rng, lists)) if r < 0.7 else syllables(rng)


def email(rng: Random) -> str:
    user = username(rng).replace("é", "e")
    domain = pick(
        rng,
        (
            "example.com",
            "mail.com",
            "corp.net",
            "work.org",
            "{w}.com",
            "{w}.io",
            "{w}.org",
            "{w}.dev",
            "{w}.co",
        ),
    )
    return f"{user}@{domain.format(w=word(rng))}"


def stem(rng: Random) -> str:
    r = rng.random()
    a, b = word(rng), word(rng)
    if r < 0.5:
        return a
    if r < 0.68:
        return f"{a}_{b}"
    if r < 0.8:
        return f"{a}-{b}"
    if r < 0.87:
        return f"{a}{digits(rng, 1, 3)}"
    if r < 0.94:
        return f"{a}_{pick(rng, VERBISH)}"
    return pick(
        rng,
        (
            "README",
            "Makefile",
            "CHANGELOG",
            "main",
            "index",
            "config",
            "setup",
            "settings",
            "Dockerfile",
            "TODO",
        ),
    )


def filename(rng: Random) -> str:
    name = stem(rng)
    if name in ("Makefile", "Dockerfile"):
        return name
    return f"{name}.{pick(rng, EXTS)}"


def folder(rng: Random) -> str:
    parts = [pick(rng, DIRS) if rng.random() < 0.65 else word(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    r = rng.random()
    prefix = "" if r < 0.7 else "/" if r < 0.85 else "./" if r < 0.95 else "~/"
    return prefix + "/".join(parts) + ("/" if rng.random() < 0.1 else "")


def path(rng: Random) -> str:
    name = filename(rng)
    if rng.random() < 0.35:
        return name
    return f"{folder(rng).rstrip('/')}/{name}"


def url(rng: Random) -> str:
    host = pick(
        rng,
        ("{}.com", "{}.org", "www.{}.net", "api.{}.io", "docs.{}.dev", "localhost:8080/{}", "{}.example.com"),
    )
    tail = "" if rng.random() < 0.3 else "/" + "/".join(word(rng) for _ in range(rng.randint(1, 2)))
    return f"{pick(rng, ('https', 'https', 'http'))}://{host.format(word(rng))}{tail}"


def code_id(rng: Random) -> str:
    r = rng.random()
    if r < 0.3:
        return f"{letters(rng, 1, 3).upper()}-{digits(rng, 2, 5)}"
    if r < 0.5:
        return f"{letters(rng, 1, 2).upper()}{digits(rng, 3, 5)}"
    if r < 0.65:
        return alnum(rng, 5, 8)
    if r < 0.8:
        return f"{pick(rng, ('id', 'ref', 'usr', 'ord', 'inv', 'cus', 'doc', 'job', 'run', 'tkt'))}_{alnum(rng, 4, 7)}"
    if r < 0.92:
        return digits(rng, 3, 6)
    return f"{letters(rng, 2, 3).upper()}-{digits(rng, 2, 3)}-{letters(rng, 1, 2).upper()}"


def slug(rng: Random) -> str:
    if rng.random() < 0.04:
        return echoed(rng).replace(" ", "-").replace(",", "")
    return pick(rng, ("{a}-{b}", "{a}_{b}", "{a}", "{a}-{b}-{c}", "{a}{n}", "{a}-{n}")).format(
        a=word(rng), b=word(rng), c=word(rng), n=digits(rng, 1, 2)
    )


def service(rng: Random) -> str:
    if rng.random() < 0.5:
        return pick(
            rng,
            words("nginx redis postgres api web worker auth billing search gateway cache mailer frontend backend"),
        )
    return slug(rng)


def iso_date(rng: Random) -> str:
    return f"20{rng.randint(20, 31)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words("January February March April May June July August September October November December")


def date(rng: Random) -> str:
    r = rng.random()
    if r < 0.3:
        return iso_date(rng)
    if r < 0.5:
        return pick(rng, DAYS)
    if r < 0.63:
        return f"{pick(rng, MONTHS)} {rng.randint(1, 28)}"
    if r < 0.73:
        return f"{rng.randint(1, 28)} {pick(rng, MONTHS)}"
    if r < 0.78:
        return f"{rng.randint(1, 28)}.{rng.randint(1, 12)}.20{rng.randint(20, 31)}"
    if r < 0.83:
        return f"{rng.randint(1, 12)}/{rng.randint(1, 28)}"
    if r < 0.88:
        return f"{pick(rng, ('next', 'this'))} {pick(rng, DAYS)}"
    return pick(
        rng,
        (
            "tomorrow",
            "today",
            "tonight",
            "next week",
            "next month",
            "this weekend",
            "the weekend",
            "tomorrow morning",
            "Christmas",
            "New Year's Eve",
            "this evening",
            "the day after tomorrow",
        ),
    )


def clock(rng: Random) -> str:
    r = rng.random()
    if r < 0.5:
        return f"{rng.randint(0, 23):02d}:{pick(rng, ('00', '15', '30', '45', '05', '10', '20', '50'))}"
    if r < 0.75:
        return f"{rng.randint(1, 12)} {pick(rng, ('am', 'pm'))}"
    if r < 0.9:
        return f"{rng.randint(1, 12)}{pick(rng, ('am', 'pm'))}"
    if r < 0.95:
        return f"{rng.randint(1, 12)}:{pick(rng, ('15', '30', '45'))} {pick(rng, ('am', 'pm'))}"
    return pick(
        rng,
        (
            "noon",
            "midnight",
            "5 o'clock",
            "8 o'clock",
            "sunset",
            "lunchtime",
            "half past nine",
            "quarter to ten",
        ),
    )


def plain(rng: Random, low: int = 2, high: int = 7) -> str:
    """An everyday phrase or clause: what people write into notes, reminders, subjects and messages."""
    r = rng.random()
    t, t2, a, q, h, w = (pick(rng, x) for x in (v.THINGS, v.THINGS, v.ACTIONS, v.QUALITIES, v.HOW, v.WHO))
    place = pick(rng, v.PLACE).format(t=pick(rng, v.THINGS))
    if r < 0.2:
        return " ".join(
            pick(rng, pick(rng, (v.THINGS, v.THINGS, v.ACTIONS, v.QUALITIES, v.HOW))) for _ in range(rng.randint(1, high))
        )
    if r < 0.6:
        made = pick(
            rng,
            (
                "{a} the {t}",
                "{a} {p}",
                "{q} {t}",
                "{t} {t2}",
                "the {q} {t}",
                "{a} some {t}",
                "{a} {t} {place}",
                "{t} {place}",
                "{a} my {t}",
                "{q} {t} and {t2}",
                "{a} {h}",
                "{t} for {p}",
                "{a} a {q} {t}",
                "{t}",
                "{a} the {t} and {a2} the {t2}",
                "{p}'s {t}",
                "{n} {t}s",
                "{a} with {p}",
                "{t} and {t2}",
                "a {t} {place}",
                "{a} {n} {t}s",
            ),
        )
    elif r < 0.9:
        made = pick(
            rng,
            (
                "{w} will {a} the {t} {h}",
                "{w} can {a} {h}",
                "I'll be {n} minutes late",
                "the {t} is {q}",
                "the {t} {place} is {q}",
                "{w} want to {a} {place}",
                "please {a} the {t}",
                "don't {a} the {t}",
                "{w} should {a} {h} {place}",
                "can we {a} the {t} {h}?",
                "I'm {q} today",
                "it's {q} {place}",
                "there is a {t} {place}",
                "I can't {a} {h}",
                "we have no {t}",
                "{p} has the {t}",
                "I left the {t} {place}",
                "see you {place}",
                "{w} didn't {a} the {t}",
                "your {t} is {q}",
                "the {t} costs {n} euros",
                "I'd like to {a} {h}",
                "let's {a} {place}",
                "{w} will not {a} the {q} {t}",
                "where is my {t}?",
                "the {q} {t} arrives {h}",
                "I need {n} {t}s by {d}",
                "{w} was {h} {q}",
            ),
        )
    else:
        made = pick(
            rng,
            (
                "{w} {a} the {t} {j} {w2} {a2} {h}",
                "the {t} is {q} {j} the {t2} is {q2}",
                "I {a} {place} {j} you {a2} {h}",
                "{a} the {t} {j} {a2} the {t2}",
                "{q} {t}, {q2} {t2}",
                "{t}, {t2} and {a}",
                "please {a} the {t} {j} {w} {a2} it",
            ),
        )
    return made.format(
        t=t,
        t2=t2,
        a=a,
        a2=pick(rng, v.ACTIONS),
        q=q,
        q2=pick(rng, v.QUALITIES),
        h=h,
        w=w,
        w2=pick(rng, v.WHO),
        j=pick(rng, v.JOIN),
        place=place,
        p=pick(rng, FIRST),
        n=rng.randint(2, 30),
        d=pick(rng, DAYS),
    )


def cased(text: str, rng: Random, share: float) -> str:
    return text[0].upper() + text[1:] if rng.random() < share else text


def title(rng: Random) -> str:
    if rng.random() < 0.6:
        return cased(plain(rng), rng, 0.4)
    a, n, v = pick(rng, ADJ), pick(rng, NOUNS), pick(rng, VERBISH)
    made = pick(
        rng,
        (
            "{a} {n}", "{v} the {n}", "{n} {v}", "the {a} {n}", "{v} {a} {n}s", "{n} review", "{n} meeting", "{p} and {q}",
            "call {p}", "lunch with {p}", "{v} {n} for {p}", "{w}", "{a} {w}", "buy {n}s", "fix {n} {v}", "weekly {n}", "{q} {n}",
            "{u}",
        ),
    ).format(a=a, n=n, v=v, p=pick(rng, FIRST), q=invented(rng), w=syllables(rng), u=pick(rng, NONASCII))  # fmt: skip
    return made[0].upper() + made[1:] if rng.random() < 0.4 else made


def sentence(rng: Random) -> str:
    r = rng.random()
    if r < 0.06:
        return pick(rng, NONASCII)
    if r < 0.09:
        return echoed(rng)
    if r < 0.62:
        return cased(plain(rng), rng, 0.4)
    made = pick(
        rng,
        (
            "the {n} is {a}", "I will be late", "see you at {t}", "{p} likes the {a} {n}", "please {v} the {n} by {d}", "{n} {v} done",
            "we need {k} more {n}s", "meet me in {c}", "the {n} starts at {t}", "{w} is down again", "thanks for the {n}", "hello {p}",
            "do not forget the {n}", "bring {k} {n}s and a {m}", "the code is {i}", "happy birthday {p}", "all tests pass",
            "running {k} minutes late", "can we move the {n} to {d}", "the {a} {n} needs a {m}", "I love {c} in the {n}",
            "{v} failed on {w}", "the password is {i}", "good {m}, {p}", "{w} {v} {k}", "my {n} is {a} and {b}", "TODO {v} {w}",
        ),
    ).format(
        a=pick(rng, ADJ), b=pick(rng, ADJ), n=pick(rng, NOUNS), m=pick(rng, NOUNS), v=pick(rng, VERBISH), w=syllables(rng),
        p=pick(rng, FIRST), c=pick(rng, CITIES), t=clock(rng), k=rng.randint(2, 40), i=code_id(rng), d=pick(rng, DAYS),
    )  # fmt: skip
    return made[0].upper() + made[1:] if rng.random() < 0.35 else made


def snippet(rng: Random) -> str:
    """A short piece of text to put into a file: a sentence, an assignment, a line of code."""
    r = rng.random()
    if r < 0.4:
        return sentence(rng)
    if r < 0.48:
        return f"{MAKERS['ip'](rng)} {slug(rng)}" + (f"\n{MAKERS['ip'](rng)} {slug(rng)}" if rng.random() < 0.4 else "")
    if r < 0.56:
        return "\n".join(sentence(rng) for _ in range(rng.randint(2, 4)))
    return pick(
        rng,
        (
            "{k}={v}", "{k} = {v}", "{k}: {v}", "print('{s}')", "print(\"{s}\")", "import {w}", "def {w}(): pass", "# {s}", "{w}({n})",
            "echo {w}", "export {K}={v}", "- {s}", "{w},{k},{n}", "<h1>{w}</h1>", "return {w} + {n}", "let {w} = {n};", "{K}={n}",
            "{w}\n{k}\n{v}", "# {k}\n{s}", "{k} = {n}\n{w} = {v}",
        ),
    ).format(k=word(rng), K=word(rng).upper(), v=slug(rng), s=sentence(rng), w=syllables(rng), n=rng.randint(0, 99))  # fmt: skip


def query(rng: Random) -> str:
    r = rng.random()
    if r < 0.5:
        return plain(rng, 1, 4)
    if r < 0.62:
        return pick(rng, TOPICS)
    if r < 0.75:
        return f"{pick(rng, ADJ)} {pick(rng, NOUNS)}" + (f" {pick(rng, NOUNS)}" if rng.random() < 0.3 else "")
    if r < 0.9:
        return f"{pick(rng, NOUNS)} {syllables(rng)}"
    return person(rng)


def pattern(rng: Random) -> str:
    r = rng.random()
    if r < 0.3:
        return pick(
            rng,
            (
                "TODO",
                "FIXME",
                "import",
                "def main",
                "async def",
                "class",
                "error",
                "WARNING",
                "password",
                "timeout",
            ),
        )
    if r < 0.6:
        return f"{pick(rng, VERBISH)}_{pick(rng, NOUNS)}"
    if r < 0.8:
        return pick(rng, VERBISH) + pick(rng, NOUNS).capitalize()
    return syllables(rng)


def command(rng: Random) -> str:
    r = rng.random()
    if r < 0.4:
        return pick(rng, COMMANDS)
    return pick(
        rng,
        (
            "cat {p}", "ls {f}", "ls -l {f}", "grep {w} {p}", "python {p}", "wc -l {p}", "head -n {n} {p}", "tail -n {n} {p}",
            "rm {p}", "mkdir {f}", "touch {p}", "echo {w}", "pip install {w}", "npm install {w}", "git checkout {b}", "chmod +x {p}",
            "docker logs {w}", "kill {n}", "curl {u}", "find {f} -name {w}", "grep -rn {w} {f}", "node {p}", "pytest {p}", "du -sh {f}",
            "git commit -m '{w}'", "systemctl restart {w}", "ping {w}.com", "sort {p} | uniq -c", "make {w}",
        ),
    ).format(p=path(rng), f=folder(rng), w=word(rng), n=rng.randint(1, 90), b=slug(rng), u=url(rng))  # fmt: skip


def number(rng: Random) -> int:
    r = rng.random()
    return rng.randint(1, 20) if r < 0.4 else rng.randint(10, 100) if r < 0.75 else rng.randint(100, 9999)


def amount(rng: Random) -> float | int:
    return number(rng) if rng.random() < 0.75 else round(rng.uniform(0.5, 900), rng.choice((1, 2)))


def version(rng: Random) -> str:
    return f"{rng.randint(0, 9)}.{rng.randint(0, 20)}.{rng.randint(0, 9)}"


def phone(rng: Random) -> str:
    return pick(rng, ("555-{a}", "+{c} {b} {a}", "0{b} {a}", "{b}-{d}")).format(
        a=digits(rng, 4, 4), b=digits(rng, 2, 3), c=digits(rng, 1, 2), d=digits(rng, 5, 6)
    )


def unit_pair(rng: Random) -> str:
    return pick(
        rng,
        (
            "km",
            "miles",
            "m",
            "feet",
            "kg",
            "pounds",
            "celsius",
            "fahrenheit",
            "liters",
            "gallons",
            "inches",
            "cm",
        ),
    )


def echoed(rng: Random) -> str:
    """Text whose parts repeat, which is harder to copy than it looks."""
    a, b = word(rng), word(rng)
    n, m = rng.randint(0, 9), rng.randint(0, 9)
    return pick(
        rng,
        (
            "{a} {a} {b}",
            "{n}{n}{m}{m}",
            "{n}.{n}.{n}",
            "{a}-{b}-{a}",
            "{a}/{a}.py",
            "{n}{m}{n}{m}{n}",
            "{a} {n}, {a} {m}",
            "{a}={a}",
            "{n} {a} {n} {b}",
            "the {a}, the {b}, the {a}",
            "{n}00{m}00",
            "{a}_{a}_{b}",
            "{a}.{a}.{b}",
        ),
    ).format(a=a, b=b, n=n, m=m)


MAKERS: dict[str, Maker] = {
    "city": city, "country": country, "first": first_name, "person": person, "someone": someone, "user": username, "word": word,
    "email": email, "file": filename, "folder": folder, "path": path, "url": url, "id": code_id, "slug": slug, "service": service,
    "date": date, "isodate": iso_date, "clock": clock, "title": title, "sentence": sentence, "snippet": snippet, "query": query,
    "pattern": pattern, "command": command, "number": number, "amount": amount, "version": version, "phone": phone,
    "noun": lambda rng: pick(rng, NOUNS) if rng.random() < 0.4 else pick(rng, v.THINGS), "adj": lambda rng: pick(rng, ADJ), "invented": invented, "verb": lambda rng: pick(rng, VERBISH),
    "ip": lambda rng: pick(rng, ("127.0.0.1", "0.0.0.0", "10.0.0.{a}", "192.168.{b}.{a}", "{a}.{a}.{b}.{b}", "localhost:{b}{a}", "10.{b}.{b}.{a}")).format(a=rng.randint(1, 254), b=rng.randint(0, 9)),
    "echoed": echoed,
    "thing": lambda rng: pick(rng, v.THINGS) if rng.random() < 0.7 else f"{pick(rng, v.QUALITIES)} {pick(rng, v.THINGS)}",
    "plain": plain,
    "product": lambda rng: f"{pick(rng, v.QUALITIES)} {pick(rng, v.THINGS)}" if rng.random() < 0.4 else f"{pick(rng, v.THINGS)} {pick(rng, v.THINGS)}" if rng.random() < 0.3 else f"{pick(rng, ADJ)} {pick(rng, NOUNS)}" if rng.random() < 0.6 else f"{pick(rng, NOUNS)} {invented(rng)}",
    "dish": lambda rng: pick(rng, DISHES), "unit": unit_pair, "nonascii": lambda rng: pick(rng, NONASCII),
    "ticker": lambda rng: letters(rng, 3, 4).upper(),
    "branch": lambda rng: pick(rng, ("feature/{}", "fix/{}", "{}", "release/{}", "bugfix-{}")).format(slug(rng)),
    "currency": lambda rng: pick(rng, ("USD", "EUR", "GBP", "JPY", "CHF", "CAD", "AUD", "INR", "SEK", "PLN", "BRL")),
    "language": lambda rng: pick(rng, words("French German Spanish Italian Portuguese Dutch Polish Swedish Greek Turkish Japanese Korean Hindi Arabic")),
    "key": lambda rng: pick(rng, ("{a}_{b}", "{a}.{b}", "{a}", "{a}:{n}")).format(a=word(rng), b=pick(rng, NOUNS), n=digits(rng, 1, 3)),
    "envvar": lambda rng: pick(rng, ("{a}_{b}", "{a}", "{a}_URL", "{a}_PORT")).format(a=word(rng).upper(), b=pick(rng, NOUNS).upper()),
    "day": lambda rng: pick(rng, DAYS), "tracking": lambda rng: letters(rng, 2, 2).upper() + digits(rng, 7, 9),
    "room": lambda rng: pick(rng, ("kitchen", "bedroom", "living room", "office", "garage", "bathroom", "hallway", "attic", "cellar", "nursery")),
    "hex": lambda rng: "".join(pick(rng, "0123456789abcdef") for _ in range(rng.randint(7, 10))),
}  # fmt: skip

# Closed vocabulary: these may appear in both splits.
EXEMPT = {
    "unit",
    "currency",
    "language",
    "day",
    "dish",
    "room",
    "noun",
    "adj",
    "verb",
    "country",
    "number",
    "amount",
    "date",
    "clock",
}


def make(kind: str, rng: Random, held_out: bool) -> object:
    """A value of the named kind from the asked split.

    kind: a key of MAKERS, or ``int:LOW:HIGH``, ``float:LOW:HIGH:DIGITS``, ``pick:a,b,c``.
    """
    if ":" in kind:
        head, _, rest = kind.partition(":")
        if head == "int":
            low, high = rest.split(":")
            return rng.randint(int(low), int(high))
        if head == "float":
            low, high, places = rest.split(":")
            return round(rng.uniform(float(low), float(high)), int(places))
        return pick(rng, rest.split(","))
    maker = MAKERS[kind]
    if kind in EXEMPT:
        return maker(rng)
    for _ in range(60):
        value = maker(rng)
        if is_held_out(str(value)) == held_out:
            return value
    return maker(rng)
