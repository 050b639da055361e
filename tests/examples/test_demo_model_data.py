"""The generator, the template and the tokenizer agree with each other and with what a server does."""

import json
from pathlib import Path
from random import Random

import pytest

from examples.demo_model import grammar, rows, sloppy, special, sums, tokenizer, values
from examples.demo_model.data import parse_mix, write_session
from examples.demo_model.dialogues import KINDS, Writer
from examples.demo_model.evaluate import evaluate, parse, schema_error
from examples.demo_model.everyday import Everyday, story
from examples.demo_model.kinds_everyday import CHAINS, EVERYDAY, KITS
from examples.demo_model.kinds_plain import CHAINS as PLAIN_CHAINS
from examples.demo_model.kinds_plain import PLAIN
from examples.demo_model.plainly import Plain, pointed

MODEL = Path(__file__).parents[2] / "agentserve" / "demo_model"
SPECIAL_SLOTS = {"ask_key", "ask_value", "files_and"}
ALL_KINDS = [*KINDS.values(), *EVERYDAY.values(), *PLAIN.values()]


@pytest.fixture(scope="module")
def encoder() -> rows.Encoder:
    return rows.Encoder(str(MODEL / "tokenizer.json"))


def session(seed: int, held_out: bool = False, turns: int = 4):
    writer = Writer(Random(seed), held_out)
    for _ in range(turns):
        writer.turn()
    return writer.session


@pytest.mark.parametrize("kind", ALL_KINDS, ids=lambda kind: kind.key)
def test_every_phrase_of_a_kind_parses_and_uses_known_slots(kind):
    fields = {field for field, _, _ in kind.out}
    if kind.key in PLAIN:
        assert not fields & {arg.key for arg in kind.args}  # a result would take the place of what was asked for
    known = {arg.key for arg in kind.args} | fields | {f"{field}_and" for field in fields} | SPECIAL_SLOTS
    known |= {f"@{arg.key}" for arg in kind.args if arg.maker == "moment"}
    if kind.key == "reminder":
        known.add("at")
    for phrase in (kind.names, kind.desc, kind.imp, kind.ask, kind.text, kind.say):
        assert grammar.slot_names(phrase) <= known


def test_unbalanced_phrase_is_an_error():
    with pytest.raises(grammar.PhraseError, match="missing"):
        grammar.parse("a [b|c")


def test_right_answers_repeat_values_and_calls_fit_their_schema():
    for seed in range(150):
        made = session(seed)
        declarations = [tool.declaration for tool in made.tools]
        for turn in made.turns:
            assert all(value in turn.answer for value in turn.must)
            for step in turn.steps:
                for call in step.calls:
                    assert schema_error({"name": call.tool.name, "arguments": call.arguments}, declarations) is None


def test_everyday_calls_fit_their_schema_and_take_every_value_from_what_was_said():
    shapes = set()
    for seed in range(200):
        writer = Everyday(Random(seed), held_out=seed % 2 == 0)
        declarations = [tool.declaration for tool in writer.session.tools]
        for _ in range(4):
            turn = writer.turn()
            shapes.add((turn.shape, len(turn.steps)))
            assert all(value in turn.answer for value in turn.must)
            said = turn.user.lower()
            for step in turn.steps:
                for call in step.calls:
                    made = {"name": call.tool.name, "arguments": call.arguments}
                    assert schema_error(made, declarations) is None
                    for value in call.arguments.values():
                        free = call.tool.kind.key in ("calc", "read_text")  # worded; folder and name joined
                        plain = str(value).lower().rstrip("?.! ")
                        assert free or turn.shape == "follow" or plain in said or value is True
                said += " ".join(call.result.lower() for call in step.calls)
    assert {("single", 1), ("parallel", 1), ("chain", 2)} <= shapes


def test_everyday_toolboxes_name_kinds_that_exist():
    assert {key for kit in KITS for key in kit} <= EVERYDAY.keys()
    for chain in CHAINS:
        assert chain.field in {field for field, _, _ in EVERYDAY[chain.first].out}
        assert chain.arg in {arg.key for arg in EVERYDAY[chain.second].args}


def test_plain_calls_fit_their_schema_and_take_every_value_from_what_was_said():
    shapes = set()
    for seed in range(400):
        writer = Plain(Random(seed), held_out=seed % 2 == 0)
        declarations = [tool.declaration for tool in writer.session.tools]
        for _ in range(4):
            turn = writer.turn()
            shapes.add((turn.shape, len(turn.steps)))
            assert all(value in turn.answer for value in turn.must)
            assert not any(sloppy.is_mask(char) for char in turn.user)
            said = turn.user
            for step in turn.steps:
                for call in step.calls:
                    made = {"name": call.tool.name, "arguments": call.arguments}
                    assert schema_error(made, declarations) is None
                    for value in call.arguments.values():
                        free = call.tool.kind.key in ("compute", "open_file")  # worded; folder and name joined
                        plain = str(value).rstrip("?.! ")
                        assert free or turn.shape == "follow" or plain.lower() in said.lower() or value is True
                said += " ".join(call.result for call in step.calls)
    assert {("single", 1), ("parallel", 1), ("chain", 2), ("abilities", 0)} <= shapes


def test_chains_of_plain_kinds_name_fields_and_arguments_that_exist():
    for chain in PLAIN_CHAINS:
        assert chain.field in {field for field, _, _ in PLAIN[chain.first].out}
        assert chain.arg in {arg.key for arg in PLAIN[chain.second].args}


def test_a_pronoun_takes_the_place_of_the_noun_and_the_value():
    assert pointed("is [the |]train {train} late", "train", ("train",)) == "is {train} late"
    assert pointed("where is [my |the |][parcel|package] {number}", "number", ("parcel", "package")) == "where is {number}"


def test_hurried_typing_leaves_values_alone():
    mask = chr(0xE000)
    for seed in range(300):
        typed = sloppy.sloppy(f"Could you please tell me what's in {mask}, thanks?", Random(seed))
        assert typed.count(mask) == 1
        assert "Über/Main.PY" in sloppy.unmask(typed, {mask: "Über/Main.PY"}, {mask}, Random(seed))


def test_without_tools_the_abilities_are_said_once_and_short():
    answers = set()
    for seed in range(200):
        writer = Writer(Random(seed), held_out=False, tool_count=0)
        for _ in range(6):
            turn = writer.turn()
            if turn.shape == "abilities":
                answers.add(turn.answer)
    assert answers
    assert all("tools" in answer and len(answer) < 100 for answer in answers)


def test_a_mix_names_writers_and_adds_up():
    assert parse_mix("broad=0.4,plain=0.6") == {"broad": 0.4, "plain": 0.6}
    with pytest.raises(ValueError, match="no writer loud"):
        parse_mix("loud=1")
    with pytest.raises(ValueError, match="not 1"):
        parse_mix("broad=0.4,plain=0.5")


def test_short_rows_leave_room_for_turns():
    for seed in range(60):
        made, _ = write_session(Random(seed), 512, False, {"plain": 0.5, "broad": 0.5})
        head = rows.system_pieces(made.system, [tool.declaration for tool in made.tools])
        assert sum(len(piece.text) for piece in head) < 512 * 3 * 0.75


def test_two_steps_of_arithmetic_build_on_each_other():
    for seed in range(300):
        first, second, request = sums.two_steps(Random(seed))
        assert second.startswith(special.evaluate(first) + " ")
        assert all(number in request for number in first.split()[::2])


def test_a_story_keeps_the_request_whole():
    for seed in range(200):
        assert "the 7 pm train to Oslo" in story("look up the 7 pm train to Oslo", Random(seed), True)


def test_tool_names_of_the_two_splits_do_not_meet():
    names = [{tool.name for seed in range(200) for tool in session(seed, held, 0).tools} for held in (False, True)]
    assert not names[0] & names[1]
    assert all(not values.is_held_out(name) for name in names[0])


def messages_of(made) -> list[dict]:
    messages = [{"role": "system", "content": made.system}] if made.system else []
    for turn in made.turns:
        if turn.note:
            messages.append({"role": "system", "content": turn.note})
        messages.append({"role": "user", "content": turn.user})
        for step in turn.steps:
            calls = [{"type": "function", "function": {"name": c.tool.name, "arguments": c.arguments}} for c in step.calls]
            messages.append({"role": "assistant", "content": "", "reasoning_content": step.thinking, "tool_calls": calls})
            messages += [{"role": "tool", "content": call.result} for call in step.calls]
        messages.append({"role": "assistant", "content": turn.answer, "reasoning_content": turn.thinking})
    return messages


@pytest.mark.parametrize("mode", ["keep", "template"])
def test_training_rows_are_the_chat_template(mode):
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(MODEL)
    for seed in range(40):
        made = session(seed)
        if not made.system and made.turns[0].note:
            continue  # a leading system message is a system prompt for the template
        want = template.apply_chat_template(
            messages_of(made),
            tools=[{"type": "function", "function": tool.declaration} for tool in made.tools] or None,
            tokenize=False,
            preserve_thinking=mode == "keep",
        )
        assert "".join(piece.text for piece in rows.session_pieces(made, mode)) == want


def test_markers_are_single_tokens_and_never_come_from_content(encoder):
    for marker in tokenizer.MARKERS:
        assert len(encoder.special.encode(marker).ids) == 1
        ids = encoder.plain.encode(f"a {marker} b").ids
        assert encoder.special.token_to_id(marker) not in ids
        assert encoder.special.decode(ids, skip_special_tokens=False) == f"a {marker} b"


@pytest.mark.parametrize("value", ["Paris", "src/main_util.py", "東京 12", "naïve café", "ord_x71q", "127.0.0.1"])
def test_a_value_is_cut_the_same_way_everywhere(encoder, value):
    alone = encoder.plain.encode(value).ids
    for before, after in (("in ", "?"), ('{"city": "', '"}'), ("\n", "\n"), ("(", ")"), ("/", "/")):
        ids = encoder.plain.encode(before + value + after).ids
        assert any(ids[i : i + len(alone)] == alone for i in range(len(ids)))


def test_transformers_reads_the_same_tokens(encoder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    text = 'Read src/über/main.py, 東京 "x" it\'s {"a": 1}\n\n  def f():\n    return 3'
    assert theirs(text, add_special_tokens=False).input_ids == encoder.special.encode(text).ids
    assert theirs.decode(encoder.special.encode(text).ids) == text


def oracle(encoder, sessions):
    """A generator that always writes what the dialogue wants."""
    script = []
    for made in sessions:
        outputs = []
        for turn in made.turns:
            for step in turn.steps:
                calls = [json.dumps({"name": c.tool.name, "arguments": c.arguments}) for c in step.calls]
                outputs.append(rows.generated(step.thinking, "", calls) + "<|im_end|>")
            outputs.append(rows.generated(turn.thinking, turn.answer, []) + "<|im_end|>")
        script.append(iter(outputs))
    live = list(script)

    def generate(prompts):
        assert len(prompts) <= len(live)
        outputs = []
        while len(outputs) < len(prompts):
            text = next(live[len(outputs)], None)
            if text is None:
                live.pop(len(outputs))
            else:
                outputs.append(encoder.special.encode(text).ids)
        return outputs

    return generate


def test_evaluation_gives_a_perfect_model_full_marks(encoder):
    sessions = [session(seed, held_out=True, turns=2) for seed in range(12)]
    plays, counts = evaluate(oracle(encoder, sessions), encoder, sessions)
    assert counts["answered_right"] == counts["turns"] == 24
    assert counts["valid"] == counts["calls"] > 0
    assert not any(play.failures for play in plays)


def test_evaluation_sees_a_wrong_argument(encoder):
    sessions = [next(s for s in (session(seed, True, 1) for seed in range(50)) if s.turns[0].shape == "single")]
    perfect = oracle(encoder, sessions)

    def spoiled(prompts):
        return [
            encoder.special.encode(
                encoder.special.decode(ids, skip_special_tokens=False).replace('"arguments": {"', '"arguments": {"x')
            ).ids
            for ids in perfect(prompts)
        ]

    _, counts = evaluate(spoiled, encoder, sessions)
    assert counts["called_right"] == 0
    assert counts["valid"] == 0


def test_a_cut_off_call_is_broken_not_valid():
    output = parse('<think>\na\n</think>\n\n<tool_call>\n{"name": "x", "argu')
    assert (output.broken, output.calls, output.ended) == (1, [], False)
