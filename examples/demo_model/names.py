"""Values in the shapes that people write: rare words, codes with spaces, titles, points in time.

Copying is learned from the variety of token sequences, so words here are spelled like English but mostly do not exist.
"""

from __future__ import annotations

from random import Random

from examples.demo_model import values
from examples.demo_model import vocabulary as v
from examples.demo_model.values import digits, letters, pick, words

HEADS = words(
    "plumb gard carp brick cand sauc trum whist blist crick thund wald hamst pump spind clov ging vinc bast pigm chrom serend epiph "
    "quant turb magn gran flam velv ros alch astr bibl cart cosm crypt demo dextr ethn fract gargl glac grav hydr jub kal labyr luc "
    "mamm marv mel mimos nebul nomad octav orch pand parch pirou quiv rhaps sapph scaff shimm sibl sold spark squir stell strat swelt "
    "tang temp thres tinct umbr vagab vex wand wrangl yarn zeph zing brid chisel drizz ember frig gobl hatch ink jaunt knick lant "
    "moss nect olive perch quill rust saff thistl upl vault whirl yoke brav cinn dwind fumbl gleam hust"
)
TAILS = words(
    "er ers ing ity ation ous ful ship ment al ist ware let ster ance ence able ish ic ical ism ory ery ure ette ade age dom hood ling "
    "ing or ian ive ile oid ant ent ard ium us ia a o y ies ed en ly le on in et ot ick ack ock ump ust"
)
FRONTS = (
    "",
    "",
    "",
    "",
    "",
    "re",
    "un",
    "over",
    "inter",
    "sub",
    "micro",
    "photo",
    "pre",
    "mis",
    "counter",
    "ultra",
    "back",
    "out",
)
REAL = words(
    "plumber electrician carpenter gardener baker butcher tailor barber florist optician vet babysitter janitor librarian accountant "
    "passport permit visa receipt luggage suitcase backpack wallet charger adapter printer scanner router monitor tripod drill ladder "
    "hammer wrench screwdriver toolbox paintbrush bucket mop broom vacuum dishwasher freezer kettle toaster blender spatula whisk "
    "spinach broccoli cucumber pumpkin zucchini lentils chickpeas yoghurt mustard vinegar cinnamon saffron parsley raspberry apricot "
    "pineapple coconut walnut almond pancake waffle lasagna risotto curry noodles dumpling sushi burrito brownie muffin croissant "
    "violin cello trumpet clarinet saxophone harmonica drum accordion choir orchestra opera ballet sculpture pottery origami chess "
    "volleyball badminton archery fencing rowing sailing surfing snowboard skateboard marathon triathlon yoga pilates climbing kayak "
    "dolphin octopus penguin flamingo hedgehog squirrel beaver badger otter lynx falcon sparrow woodpecker beetle dragonfly spider "
    "tulip daffodil orchid cactus bamboo willow birch maple fern moss lavender sunflower volcano glacier canyon lagoon reef prairie "
    "ephemeral ubiquitous melancholy serendipity gregarious nostalgia resilient obsolete tedious frugal candid eloquent vivid placid "
    "brevity candor dilemma enigma facade hiatus jargon kudos lethargy mundane nuance paradox quaint rustic stoic tacit umbrage "
    "mortgage pension dividend warranty subsidy tariff ledger voucher deposit auction tenant landlord lease eviction inheritance "
    "quarterly annual budget roadmap milestone sprint backlog retrospective onboarding payroll compliance audit inventory logistics "
    "satellite telescope microscope thermometer barometer compass turbine generator transistor capacitor antenna laser hologram"
)
DEEDS = words(
    "renew feed water vacuum iron mow trim polish sharpen refill charge update upgrade unplug assemble install inspect collect deliver "
    "return exchange cancel confirm book reserve schedule postpone reschedule submit sign scan print shred upload download backup "
    "restart calibrate measure translate proofread rehearse memorize rinse defrost marinate bake roast grill peel chop knead stretch"
)  # fmt: skip


def hard_word(rng: Random) -> str:
    """A word with an unusual sequence of tokens."""
    if rng.random() < 0.45:
        return pick(rng, REAL)
    return pick(rng, FRONTS) + pick(rng, HEADS) + pick(rng, TAILS)


def any_word(rng: Random) -> str:
    r = rng.random()
    return (
        hard_word(rng)
        if r < 0.45
        else pick(rng, v.THINGS)
        if r < 0.8
        else pick(rng, v.QUALITIES)
        if r < 0.9
        else values.word(rng)
    )


def phrase(rng: Random) -> str:
    """One to five words, as somebody searches for something."""
    t, u, q = any_word(rng), any_word(rng), pick(rng, v.QUALITIES)
    made = pick(
        rng,
        ("{t}", "{q} {t}", "{t} {u}", "{q} {t} {u}", "{t} for {u}s", "{t} near {c}", "how to {a} a {t}", "{q} {t} recipes", "best {t} in {c}",
         "{t} and {u}", "history of {c}", "{t} without {u}", "{q} {q2} {t}", "cheap {t} {u}", "{t} opening hours", "{n} {t} ideas", "{p} biography"),
    )  # fmt: skip
    return made.format(
        t=t,
        u=u,
        q=q,
        q2=pick(rng, v.QUALITIES),
        c=values.city(rng),
        a=pick(rng, DEEDS),
        n=rng.randint(2, 50),
        p=values.person(rng),
    )


def deed(rng: Random) -> str:
    """Something to do, for reminders, tasks and calendars."""
    a = pick(rng, DEEDS) if rng.random() < 0.5 else pick(rng, v.ACTIONS)
    made = pick(
        rng,
        ("{a} the {t}", "{a} the {t}", "call the {t}", "call {p}", "{a} my {t}", "{a} {p}'s {t}", "buy {t}s", "buy {t} and {u}", "{a} the {q} {t}",
         "{a} the {t} for {p}", "send {p} the {t}", "pick up {p}", "pay the {t} bill", "meet {p} at the {t}", "take {p} to the {t}", "{a} {t}",
         "{a} the {t} and the {u}", "ask {p} about the {t}", "see the {t}", "get a new {t}", "write to {p}", "bring the {t} back"),
    )  # fmt: skip
    return made.format(a=a, t=any_word(rng), u=any_word(rng), q=pick(rng, v.QUALITIES), p=values.first_name(rng))


def label(rng: Random) -> str:
    """A title of one to four words, as songs, films, books and lists have it."""
    parts = [any_word(rng) for _ in range(pick(rng, (1, 2, 2, 2, 3, 3, 4)))]
    text = " ".join(part.capitalize() for part in parts)
    r = rng.random()
    if r < 0.12:
        return "The " + text
    if r < 0.18:
        return text + pick(rng, (" of ", " and the ", " in ")) + any_word(rng).capitalize()
    if r < 0.22:
        return f"{text} {rng.randint(2, 99)}"
    return text.lower() if r > 0.9 else text


def part_code(rng: Random) -> str:
    """Numbers of articles, orders, tickets, parcels: digits, letters, dashes, dots, slashes."""
    form = pick(rng, ("ddd-L", "dd-L", "dddd-L", "LL-dd-dddd", "L-ddd", "LLdd", "dLddddLL", "dddd", "ddddd", "L.ddd", "LL/dddd", "L-dddd", "LLL-ddd",
                      "dd.ddd", "Ldd", "LLdddd", "dd-dd-dd", "dddLL", "LLL dd", "L ddd", "#dddd", "l-ddd", "lldd", "dddddddd", "LL-d", "dLdL", "ddL"))  # fmt: skip
    made = "".join(
        digits(rng, 1, 1) if c == "d" else letters(rng, 1, 1).upper() if c == "L" else letters(rng, 1, 1) if c == "l" else c
        for c in form
    )
    return made


def train(rng: Random) -> str:
    return f"{pick(rng, ('ICE', 'IC', 'RE', 'RB', 'TGV', 'EC', 'S', 'IR', 'NJ', 'AVE', 'R', 'U', letters(rng, 1, 3).upper()))}{pick(rng, (' ', ' ', ' ', '', '-'))}{digits(rng, 1, 4)}"


def flight_number(rng: Random) -> str:
    return letters(rng, 2, 2).upper() + pick(rng, ("", "", "", " ", "-")) + digits(rng, 2, 4)


def moment(rng: Random) -> str:
    """A point in time as people say it, with its preposition left out."""
    h, d = rng.randint(1, 12), pick(rng, values.DAYS)
    return pick(
        rng,
        ("{h}pm", "{h}am", "{h} pm", "{h}:30", "{c}", "{c}", "{d} at {h}", "{d} at {h}pm", "{d} at {c}", "{d}", "tomorrow", "tomorrow at {h}", "tomorrow at {c}",
         "tomorrow at {h}am", "next {d}", "{d} morning", "{d} evening", "tonight", "tonight at {h}", "tomorrow morning", "noon", "in {n} minutes",
         "in {k} hours", "half past {h}", "quarter to {h}", "{m} {n}", "the {n}th at {h}", "next week", "this evening", "next {d} at {c}", "{d} at noon"),
    ).format(h=h, d=d, c=values.clock(rng), n=rng.randint(5, 28), k=rng.randint(2, 9), m=pick(rng, words("January March April June July August October December")))  # fmt: skip


def full_name(rng: Random) -> str:
    """A person, from many languages and with more than two parts now and then."""
    r = rng.random()
    if r < 0.6:
        return values.person(rng)
    first = pick(rng, words("Søren Zoë José Łukasz Ingrid Björn Aoife Nuria Tomáš Yusuf Mei Ioana Dmitri Chiara Anaïs Jörg Renée Márton Ruth Selma Henrik Rosa Omar Pia Jens"))  # fmt: skip
    last = pick(rng, words("Sø Øberg Müller Žižek García Núñez Kowalski Lindqvist Petersen Yılmaz Delgado Ö Nguyễn Brontë Haddad Sommer Aydin Nobody Hill Tal Novák Åkesson"))  # fmt: skip
    if r < 0.9:
        return f"{first} {last}" if rng.random() < 0.5 else f"{first} {hard_word(rng).capitalize()}"
    return f"{first} {pick(rng, ('van', 'de', 'von', 'del', 'di', 'la'))} {last}"


def place(rng: Random) -> str:
    r = rng.random()
    if r < 0.7:
        return values.city(rng)
    if r < 0.85:
        return pick(rng, words("Malmö Gdańsk Zürich Århus Ulaanbaatar Reykjavík Montevideo Bologna Ghent Kraków Bilbao Porto Tromsø Riga Lagos Seoul Gdansk Izmir Antwerp Córdoba Łódź Plovdiv Tartu Hobart"))  # fmt: skip
    if r < 0.95:
        return hard_word(rng).capitalize()
    return (
        f"{pick(rng, ('Bad', 'Santa', 'Monte', 'Los', 'Cape', 'Mount', 'East', 'Rio', 'Buenos'))} {hard_word(rng).capitalize()}"
    )


def simple_path(rng: Random) -> str:
    """Files as people name them: bare, in a folder, in the home folder."""
    stem = pick(rng, (hard_word(rng), pick(rng, v.THINGS), values.word(rng), letters(rng, 1, 1)))
    if rng.random() < 0.3:
        stem += pick(rng, ("_", "-", "")) + pick(rng, (digits(rng, 1, 4), pick(rng, v.THINGS)))
    name = (
        f"{stem}.{pick(rng, words('txt md csv log py js json yaml toml ini conf pdf key bin html css sh sql xml c h rs go'))}"
    )
    r = rng.random()
    if r < 0.45:
        return name
    if r < 0.75:
        return f"{simple_folder(rng)}/{name}"
    return values.path(rng)


def simple_folder(rng: Random) -> str:
    word = pick(
        rng,
        (
            hard_word(rng),
            pick(rng, v.THINGS),
            pick(rng, words("src docs drafts logs tmp data photos invoices projects notes backup config")),
        ),
    )
    return pick(
        rng, ("{w}", "{w}", "{w}/{u}", "~/{w}", "~/{w}/{u}", "/srv/{w}", "/var/{w}", "/home/{u}/{w}", "{w}/{y}")
    ).format(w=word, u=pick(rng, v.THINGS), y=rng.randint(2015, 2030))


def foreign(rng: Random) -> str:
    """A phrase in no language in particular, as a translation."""
    return " ".join(values.syllables(rng, 1, 3) for _ in range(rng.randint(1, 4)))


def several(maker: values.Maker) -> values.Maker:
    """A maker of one to four different values."""
    return lambda rng: list(dict.fromkeys(maker(rng) for _ in range(pick(rng, (1, 1, 2, 2, 3, 4)))))


values.MAKERS.update(
    {
        "hard": hard_word, "anyword": any_word, "phrase": phrase, "deed": deed, "label": label, "part": part_code, "train": train, "flightno": flight_number,
        "moment": moment, "fullname": full_name, "placename": place, "simplepath": simple_path, "simplefolder": simple_folder, "invphrase": foreign, "namelist_ids": several(part_code), "thinglist": several(any_word),
    }
)  # fmt: skip
