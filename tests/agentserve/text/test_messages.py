"""What templates accept differs; what a context says must not get lost or move. Templates of other shapes than Qwen's."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentserve.errors import TurnFailure
from agentserve.protocol.items import (
    CustomTool,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputText,
    Message,
    PlainText,
)
from agentserve.text.errors import TemplateError
from agentserve.text.messages import call_arguments
from agentserve.text.model_text import ModelText
from agentserve.text.opaque import ContentTable, Document, to_json
from agentserve.text.template import ChatTemplate
from agentserve.text.tokenizer import Tokenizer
from tests.agentserve.text.models import FAMILIES, model, tokenizer, tokenizer_json
from tests.agentserve.text.play import answer, call, output, request, system, thought, user

families = pytest.mark.parametrize("family", FAMILIES)

STRICT = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}
"""
"""Gemma's manners: no system role, strict alternation, no tools."""

BARE = """
{%- for m in messages %}{{ m.role | upper + ': ' + m.content + '\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}
"""
"""No control tokens at all."""

LOSING = "{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def of(source: str, **variables: Any) -> ModelText:
    return ModelText(tokenizer(), ChatTemplate(source, variables))


def shown(text: ModelText, *items: Any, **options: Any) -> str:
    return text.tokenizer.decode(text.render(request(*items, **options)).ids)


@families
def test_a_failed_mcp_result_says_so(family: str):
    result = FunctionCallOutput(call_id="c", output=(PlainText("no such"), PlainText("file")), is_error=True)
    text = shown(model(family), user("x"), call("c", "f", "{}"), result)
    assert "<tool_response>\nError: no such\nfile\n</tool_response>" in text


@families
def test_developer_is_system_and_leads(family: str):
    developer = Message(role="developer", content=(InputText("Obey."),))
    text = shown(model(family), developer, user("Hi"), instructions="First.")
    assert text.index("First.") < text.index("Obey.") < text.index("Hi<|im_end|>")
    assert text.count("<|im_start|>system") == (2 if model(family).traits.habits.more_system else 1)


@families
@pytest.mark.parametrize("instructions", [None, "Be brief."])
def test_what_a_client_adds_to_its_instructions_leaves_the_tools_where_they_were(family: str, instructions: str | None):
    first, second = (Message(role="developer", content=(InputText(t),)) for t in ("You write software.", "The folder is /tmp."))
    options = {"instructions": instructions, "tools": (FunctionTool(name="read", description="Read a file"),)}
    text = model(family)
    warmed = text.render(dataclasses.replace(request(first, **options), prompt=False)).ids.tolist()
    rendered = text.render(request(first, second, user("Hi"), **options))
    if text.traits.habits.more_system:
        assert rendered.ids[: len(warmed)].tolist() == warmed
    else:  # it puts the tools first, so that only the end of the one system message moves
        closing = len(text.tokenizer.encode("<|im_end|>\n"))
        assert rendered.ids[: len(warmed) - closing].tolist() == warmed[:-closing]


def test_a_template_of_one_system_message_gets_all_in_it():
    only_first = BARE.replace(
        "{%- for", "{%- if messages[1].role == 'system' %}{{ raise_exception('one') }}{% endif %}{%- for", 1
    )
    assert not of(only_first).traits.habits.more_system
    text = shown(of(only_first), system("One."), system("Two."), user("Hi"), instructions="First.")
    assert text == "SYSTEM: First.\n\nOne.\n\nTwo.\nUSER: Hi\nASSISTANT: "


@families
def test_parts_of_a_message_are_joined(family: str):
    message = Message(role="user", content=(InputText("one "), InputText("two")))
    assert "user\none two<|im_end|>" in shown(model(family), message)


@families
def test_free_text_tools_travel_as_one_argument(family: str):
    tool = CustomTool(name="exec", description="Runs code")
    made = CustomToolCall(call_id="c", name="exec", input='print("<tool_call>")')
    text = shown(model(family), user("x"), made, CustomToolCallOutput(call_id="c", output="ok"), tools=(tool,))
    assert '"required": ["input"]' in text
    assert 'print("<tool_call>")' in text or json.dumps('print("<tool_call>")') in text


@families
@pytest.mark.parametrize("arguments", ["", "not json", "[1]", "3", '"text"', '{"a": {"b": [null, true, 1.5, "x"]}}'])
def test_any_arguments_can_be_rendered(family: str, arguments: str):
    assert shown(model(family), user("x"), call("c", "f", arguments), output("c", "ok"))


@families
def test_empty_contents_are_fine(family: str):
    assert shown(
        model(family), user(""), answer(""), user("x"), call("c", "f", "{}"), output("c", ""), thought(""), answer("y")
    )


def test_a_template_without_system_role_gets_it_in_the_first_user_message():
    text = of(STRICT, bos_token="<|endoftext|>")
    assert not text.traits.habits.system
    got = shown(text, user("Hello"), user("again"), answer("Hi"), user("More"), instructions="Be brief.")
    assert got == (
        "<|endoftext|><|im_start|>user\nBe brief.\n\nHello\n\nagain<|im_end|>\n<|im_start|>model\nHi<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>model\n"
    )


def test_tools_without_template_support_are_refused_by_name():
    text = of(STRICT, bos_token="<|endoftext|>")
    with pytest.raises(TurnFailure, match="knows no tools") as failure:
        text.render(request(user("x"), tools=(FunctionTool(name="f"),)))
    assert failure.value.code == "invalid_prompt"


def test_a_template_without_control_tokens_still_has_stretches_per_message():
    text = of(BARE)
    rendered = text.render(request(user("Hello"), answer("Hi"), user("More"), instructions="Be brief."))
    assert text.tokenizer.decode(rendered.ids) == "SYSTEM: Be brief.\nUSER: Hello\nASSISTANT: Hi\nUSER: More\nASSISTANT: "
    assert [rendered.item_of(p) for p in rendered.item_starts] == [0, 1, 2]
    assert len(rendered.cuts) >= 3
    longer = text.render(request(user("Hello"), answer("Hi"), user("More"), answer("Yes"), user("x"), instructions="Be brief."))
    head = len(rendered.ids) - len(text.tokenizer.encode("\nASSISTANT: "))
    assert longer.ids[:head].tolist() == rendered.ids[:head].tolist()


def test_a_template_that_loses_contents_is_refused_at_load():
    with pytest.raises(TemplateError, match="loses or re-orders"):
        of(LOSING)


@pytest.mark.parametrize("source", ["{% if %}", "{{ '\U000f0001' }}"])
def test_a_template_that_cannot_be_used_is_refused_at_load(source: str):
    with pytest.raises(TemplateError):
        of(source)


def test_templates_run_in_a_sandbox():
    escape = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateError):
        of(escape)


def test_template_errors_do_not_quote_contents():
    picky = "{% for m in messages %}{% if m.content == '' %}{{ raise_exception('empty: ' + messages | string) }}{% endif %}"
    picky += "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    with pytest.raises(TurnFailure) as failure:
        of(picky).render(request(user("my secret"), user("")))
    assert "secret" not in failure.value.message
    assert "empty" in failure.value.message


def test_an_empty_context_is_refused():
    with pytest.raises(TurnFailure, match="nothing to render"):
        model("qwen3").render(request())


def test_missing_template_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    with pytest.raises(TemplateError, match=r"chat_template\.jinja is missing"):
        ModelText.load(tmp_path)


def test_a_template_may_be_in_the_tokenizer_config(tmp_path):
    templates = [{"name": "default", "template": LOSING}, {"name": "tool_use", "template": BARE}]
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": templates, "eos_token": {"content": "<|im_end|>"}})
    )
    text = ModelText.load(tmp_path)
    assert "USER: x" in shown(text, user("x"))
    assert text.markers.turn_end == text.tokenizer.marker_ids("<|im_end|>")


@families
def test_late_system_messages_keep_their_place(family: str):
    text = shown(model(family), user("a"), answer("b"), system("Note."), user("c"), instructions="Be brief.")
    assert text.index("b<|im_end|>") < text.index("Note.") < text.index("c<|im_end|>")


@families
@pytest.mark.parametrize("space", ["  x", "x \n", "\n\nx\n\n", "\tx"])
def test_trimming_is_the_templates(family: str, space: str):
    """The same text comes out as from the plain template, whatever white space surrounds a content."""
    import transformers.utils.chat_template_utils as reference

    text = model(family)
    messages = [{"role": "system", "content": space}, {"role": "user", "content": space}, {"role": "assistant", "content": "a"}]
    messages += [{"role": "user", "content": space}]
    expected, _ = reference.render_jinja_template([messages], chat_template=text.template.source, add_generation_prompt=True)
    assert shown(text, user(space), answer("a"), user(space), instructions=space) == expected[0]


def test_markers_that_swallow_white_space_do():
    spec = json.loads(tokenizer_json())
    for token in spec["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_end|>"
    text = ModelText(
        Tokenizer(json.dumps(spec), {"eos_token": "<|im_end|>"}), ChatTemplate(BARE.replace("'\\n'", "'<|im_end|>\\n'"))
    )
    rendered = text.render(request(user("\n a"), answer("b")))
    assert text.tokenizer.decode(rendered.ids) == "USER: \n a<|im_end|>ASSISTANT: b<|im_end|>ASSISTANT: "


values = st.recursive(
    st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None)
@given(plain=st.dictionaries(st.text(max_size=5), values, max_size=4), ascii_only=st.booleans())
def test_json_of_hidden_contents_is_the_json_of_the_contents(plain: dict, ascii_only: bool):
    """Whole, and when a template wraps the pieces in an object of its own."""

    def dump(value: Any, *, ensure_ascii: bool) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii)

    def reveal(text: str, table: ContentTable) -> str:
        from agentserve.text.opaque import SENTINEL

        return SENTINEL.sub(lambda m: table[m[0]].text, text)

    table = ContentTable()
    document = Document(plain, table, 0, "arguments")
    whole = to_json(document, table, dump, ascii_only)
    assert reveal(whole, table) == json.dumps(plain, ensure_ascii=ascii_only)
    wrapped = to_json({"x": [document, "y"]}, table, dump, ascii_only)
    assert json.loads(reveal(wrapped, table)) == {"x": [plain, "y"]}


def test_private_use_characters_in_contents_are_only_text():
    for family in FAMILIES:
        assert "a\U000f0001b\U00100000" in shown(model(family), user("a\U000f0001b\U00100000"))


@pytest.mark.parametrize("depth", [65, 600, 200_000])
def test_arguments_nested_beyond_walking_are_text(depth: int) -> None:
    arguments = '{"a":' * depth + "1" + "}" * depth
    call = FunctionCall(call_id="c", name="f", arguments=arguments)
    assert call_arguments(call) == {"input": arguments}
