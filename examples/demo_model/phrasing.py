"""How people wrap a request: greetings, politeness, context, case and punctuation. Also small talk and system prompts."""

from __future__ import annotations

from random import Random

from examples.demo_model import special, values
from examples.demo_model.grammar import expand
from examples.demo_model.values import pick

QUESTION = {
    "what", "what's", "how", "how's", "which", "who", "where", "when", "is", "are", "do", "does", "did", "can", "could", "any",
    "should", "has", "was", "why", "am", "in", "have", "will", "whose", "until", "whom", "there's", "anything",
}  # fmt: skip
BEFORE_IMP = "[please|pls|kindly] |[can|could|would|will] you [please |] |[I|we] [need|want] you to |[I'd|I would] like you to |go ahead and |[help me|help us] |[let's|now|next,|then|ok,|okay,|alright,|first,] |[you should|you need to|try to|be so kind and|make sure to] |[my boss|my colleague|a friend|somebody|the client|{p}] [asked me|wants me|told me|needs me] to |I [have to|need to|must|want to|would like to] |[time to|it's time to] |I was [going|about] to ask you to |do me a favor and |could I [ask|get] you to |would it be possible to |any chance you could |[is it possible|are you able] to |"
GREETING = "[hi|hello|hey|hey there|hi there|good morning|good evening|yo|greetings|dear assistant|hiya|morning]"
AFTER = "[ please| for me| for me please| thanks| thank you| when you can| quickly| now| if you can| if possible| asap| right away| real quick| when you get a chance| would you| ok| cheers| if you don't mind| as soon as you can]"
CONTEXT = (
    "[I'm|I am] [working on|busy with|looking into|thinking about|preparing] [something|the {n}|a {n}|my {n}|a report|the {a} {n}].|"
    "[we|I] have a [problem|question|meeting|deadline|{a} day] [today|tomorrow|soon|].|it's [about|for] the {n}.|"
    "[this is|it is] [urgent|important|for my boss|just a test|for a friend|a bit odd].|I'm [new here|in a hurry|not sure|a bit lost|on the phone|on a train].|"
    "{p} [asked|is asking|wants to know|was wondering].|sorry to bother you.|one more thing.|quick [question|one|favor|thing].|"
    "I [forgot|lost my notes|can't remember|have no idea|was away|just got back].|my {n} is {a} [today|again|].|[let's continue|moving on|next topic|back to work].|"
    "I [need this|want it|use this] for [the {n}|a {a} {n}|my {n} project|tomorrow].|don't ask me why.|the {n} is [almost|nearly|not] [done|ready].|"
    "[we're|I'm] [packing|cooking|planning|writing|debugging|cleaning up|getting ready].|I [trust|like|thank] you."
)


def wrap_imperative(text: str, rng: Random) -> str:
    """An imperative verb phrase as somebody would write it."""
    slots = {"p": values.first_name(rng), "n": pick(rng, values.NOUNS), "a": pick(rng, values.ADJ)}
    head = expand(BEFORE_IMP, rng, slots) if rng.random() < 0.5 else ""
    question = head.startswith(("can", "could", "would", "will you", "any chance", "is it possible", "are you able"))
    tail = ""
    if rng.random() < 0.15:
        tail = expand(AFTER, rng)
        if not tail.startswith((" for", " when", " if", " now", " quickly", " as")) and rng.random() < 0.7:
            tail = "," + tail
    return dress(" ".join(f"{head}{text}{tail}".split(" ")).replace("  ", " "), rng, "?" if question else ".")


def wrap_question(text: str, rng: Random) -> str:
    first = text.split(" ", 1)[0].lower()
    question = first in QUESTION and "? " not in text
    if question and rng.random() < 0.07:
        text = (
            pick(
                rng,
                (
                    "so, ",
                    "and ",
                    "tell me, ",
                    "by the way, ",
                    "just curious: ",
                    "quick question: ",
                    "ok, ",
                    "also, ",
                    "hmm, ",
                    "please tell me: ",
                    "any idea: ",
                    "well, ",
                ),
            )
            + text
        )
    elif rng.random() < 0.08:
        text += pick(
            rng,
            (
                ", please",
                ", thanks",
                " please",
                ", do you know",
                ", can you check",
                ", can you tell me",
                " thanks",
                ", could you look it up",
                ", can you help",
            ),
        )
    return dress(text, rng, "?" if question else ".")


def dress(text: str, rng: Random, mark: str) -> str:
    """Add a greeting or context, then settle case and the final mark."""
    r = rng.random()
    parts: list[str] = []
    if r < 0.12:
        greeting = expand(GREETING, rng)
        if rng.random() < 0.5:
            text = f"{greeting}{pick(rng, (', ', ', ', ' ', '! ', ' - '))}{text}"
        else:
            parts.append(greeting + pick(rng, ("!", ".", ",")))
    elif r < 0.27:
        parts.append(
            expand(
                CONTEXT,
                rng,
                {"n": pick(rng, values.NOUNS), "a": pick(rng, values.ADJ), "p": values.first_name(rng)},
            )
        )
    casual = rng.random()
    if casual < 0.62:
        text = text[:1].upper() + text[1:]
        parts = [part[:1].upper() + part[1:] for part in parts]
    if text[-1:] not in "?.!" and (casual < 0.7 or rng.random() < 0.3):
        text += "!" if mark == "." and rng.random() < 0.04 else mark
    if parts and rng.random() < 0.12 and casual > 0.2:
        return text + " " + parts[0]
    return " ".join([*parts, text])


SYSTEM = (
    "You are a helpful assistant.|You are a helpful assistant. Use the tools when needed.|You are {w}, a [coding|software|desktop|home|office|travel|support|friendly|] [assistant|agent|helper].|"
    "You are a coding agent working in {f}. [Be brief.|Keep answers short.|Use tools to look at files.|]|You are an agent. Think, call tools, answer.|"
    "Answer [briefly|shortly|in one sentence|politely].|Today is {d}. [You are a helpful assistant.|]|The user is {p}. Be [polite|brief|kind|quick].|Current directory: {f}. Platform: [linux|macos|windows].|"
    "You help [{p}|the user|people|customers|engineers] with [work|code|daily tasks|questions|the {n} project].|You are {w}. Use the tools you have and tell the user what you found.|"
    "[Session|Request|Trace] {i}. You are a [helpful |]assistant.|Be concise.|Follow the user's instructions. [Never guess; call a tool.|]|You are a [support|sales|booking|research] agent for {w}."
)  # fmt: skip


def system_prompt(rng: Random, filler_characters: int) -> str:
    r = rng.random()
    if r < 0.22 and not filler_characters:
        return ""
    text = expand(
        SYSTEM,
        rng,
        {
            "w": values.invented(rng),
            "f": values.folder(rng),
            "d": values.iso_date(rng),
            "p": values.first_name(rng),
            "n": pick(rng, values.NOUNS),
            "i": values.code_id(rng),
        },
    )
    if filler_characters:
        text += "\n\n" + special.filler(rng, filler_characters)
    elif r > 0.88:
        text += "\n" + special.filler(rng, rng.randint(60, 400))
    return text


TALK = [
    ("[hi|hello|hey|good morning|good evening|hey there|hi there|yo|howdy][!|.|]", "Hello! [How can I help?|What can I do for you?]|Hi! What do you need?"),
    ("[how are you|how's it going|how do you do|how are you doing][ today|][?|]", "I am fine, thank you. [What can I do for you?|How can I help?]"),
    ("[thanks|thank you|thx|many thanks|thanks a lot|great, thanks|perfect, thank you|cheers|thank you so much|nice, thanks][!|.|]", "You are welcome[!|.]|[Glad to help.|Any time.]"),
    ("[who are you|what are you|what's your name|introduce yourself|tell me about yourself|are you a robot|are you human][?|]", "I am a small demo model [that can call tools|with tools].|I am the demo assistant, a tiny language model."),
    ("[bye|goodbye|see you|good night|talk to you later|that's all|that's all for now|I'm done|we're done here][!|.|]", "Goodbye!|See you[ soon|]!"),
    ("[great|nice|good|perfect|wonderful|awesome|excellent|very good|well done|good job][!|.|]", "[Glad|Happy] [to hear it|it helped].|Good. [What's next?|Anything else?]"),
    ("[ok|okay|alright|fine|sure|got it|I see][.|!|]", "[Ok.|Good.] Anything else?|Tell me if you need anything else."),
    ("tell me a joke[ please|][.|]|[do you know|got] a joke[?|]|make me laugh[.|]", "Why did the function return early? It had a date.|A byte walks into a bar and orders a bit.|I would tell you a UDP joke, but you might not get it."),
    ("[can you help me|could you help me|I need help|help][?|.|]", "Of course. What do you need?|Sure, tell me what you need."),
    ("[I am|I'm] [bored|tired|sad|stressed][.|]", "I am sorry to hear that. [Can I help with something?|Take a short break.]"),
    ("[I am|I'm] [happy|excited|great|fine][.|!|]", "I am glad to hear that!|That is good news."),
    ("[do you like|what do you think of] [music|coffee|cats|dogs|books|football|pizza|tea|movies][?|]", "I have no taste of my own, but many people like it.|I am a program, but I like being useful."),
    ("[how old are you|when were you made|where do you live|where are you from][?|]", "I am a program, [I have no age|I live in a computer].|I am only a small model in a computer."),
    ("[are you|you are] [smart|clever|stupid|real|alive][?|.|]", "I am a small model; I do my best with tools.|I am only a small demo model."),
    ("[what is|what's] the meaning of life[?|]", "Some say 42."),
    ("[do you understand me|are you there|are you listening|still there|can you hear me][?|]", "Yes, I am here.|Yes. Go ahead."),
    ("[you are wrong|that's wrong|that is not right|no, that's wrong][.|!|]", "I am sorry. Tell me what you need and I try again.|Sorry about that. [What is right?|Please tell me more.]"),
    ("[sorry|my bad|oops|never mind|forget it][.|!|]", "No problem.|That is fine."),
    ("[write|give me|tell me] a [poem|haiku|short poem][.| please|]", "Small model, few words, but every tool that I call brings an answer home."),
    ("[say|type|write|repeat] {say}[.|]", "{say}"), ("[please |]repeat after me: {say}", "{say}"),
    ("[what day is it|what's the date|what time is it][?|]", "I do not have a clock here.|I cannot see a clock, so I do not know."),
    ("[hi|hello|hey|good morning|good evening|good afternoon|evening|morning|hi again|hello there] [to you|again|assistant|my friend|robot|everybody|bot|computer][!|.|]", "Hello! [How can I help?|What can I do for you?]|Hi! What do you need?"),
    ("[good night|have a nice day|have a good weekend|take care|see you tomorrow|see you later|bye for now|bye, see you [soon|tomorrow|later]|until next time|I have to go|that's it for today|thanks, bye][.|!|]", "Goodbye!|See you[ soon|]!|Take care!"),
    ("[thank you|thanks] [very much|for your help|a lot|for everything|again|, that helped|, that's all I needed|, you are great][.|!|]", "You are welcome[!|.]|[Glad to help.|Any time.]"),
    ("[nice to meet you|pleased to meet you][.|!|]", "Nice to meet you too[!|.] [How can I help?|]"),
    ("[what's up|how was your day|how do you feel|are you ok|all good|everything fine][ today|][?|]", "I am fine, thank you. [What can I do for you?|How can I help?]"),
    ("[I love you|you're funny|you are nice|you're the best|you're great|I like you|well said][.|!|]", "Thank you[!|.]|That is kind of you."),
    ("[I'm|I am] [hungry|cold|ill|lonely|late|nervous|afraid][.|!|]", "I am sorry to hear that. [Can I help with something?|]"),
    ("[my day was|today was|it was] [long|great|terrible|boring|fun|hard][.|!|]", "Thank you for telling me. [Can I help with something?|]|I see. [What can I do for you?|]"),
    ("[are you busy|do you sleep|do you eat|do you dream|can you think|do you learn][?|]", "I am a program; I only answer and call tools.|No, I am only a small model."),
    ("[who made you|who built you|which model are you|are you chatgpt|what kind of model are you|are you an AI][?|]", "I am a small demo model[ that can call tools|].|I am the demo assistant, a tiny language model."),
    ("[yes|no|maybe|not yet|of course|exactly|right|correct][.|!|]", "[Ok.|Good.] [Anything else?|What can I do for you?]"),
    ("[wait|one moment|hold on|just a second|give me a minute][.|!|]", "[Ok, take your time.|Of course.]"),
    ("[test|testing|ping|is this working|hello, is this on|can you read this][.|?|]", "Yes, I am here.|It works."),
    ("[I don't know|no idea|hmm|well|let me think][.|]", "Take your time.|Tell me if you need anything."),
    ("[it's|it is] [late|early|friday|monday|my birthday|raining here|so hot today][.|!|]", "I see. [Can I help with something?|What can I do for you?]"),
]  # fmt: skip
NOTE = "[Reminder|Note|Info]: {s}.|{s}.|Be brief.|The context was edited.|[Tokens left|Budget]: a lot. {s}."
CANNOT = (
    "I have no tool for that.|I cannot do that with my tools.|Sorry, I have no tool for that.|None of my tools can do that."
)
NO_TOOLS = "I have no tools here, [but we can talk|so I can only talk].|Without tools I can only talk[ with you|].|I can talk and remember what you tell me. I have no tools here."
ABILITIES = "[please |][tell me|let me know] what you [can do|are able to do|can help with]|what [else |]can you do[ for me|]|[hi|hello|hey], what can you do[ for me|]|what [kind of|] [things|tasks] can you [do|handle|help with]|how [do|can] I use you|do you have [any |]tools|[what can you do|what are you able to do|how can you help me|what can you help me with|which tools do you have|what tools do you have|list your tools|what are your abilities|what do you do|what are you good at|show me what you can do|help me understand what you can do][?|]"


def talk(rng: Random, held_out: bool) -> tuple[str, str]:
    """A line of small talk and its answer."""
    said, answer = pick(rng, TALK)
    slots = {"say": str(values.make("sentence", rng, held_out))}
    said = expand(said, rng, slots)
    return (said[:1].upper() + said[1:] if rng.random() < 0.6 else said), expand(answer, rng, slots).strip()
