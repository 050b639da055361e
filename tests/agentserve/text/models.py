"""Small models of real families: a byte-level BPE tokenizer with Qwen's pre-tokenizer and markers, and such templates."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BaseTokenizer

import agentserve
from agentserve.text.aliases import AliasBook, NoAliases
from agentserve.text.model_text import ModelText
from agentserve.text.renderer import Renderer
from agentserve.text.template import ChatTemplate
from agentserve.text.tokenizer import Tokenizer
from tests.agentserve.text.families import OTHER_FAMILIES

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CORPUS = (
    "The quick brown fox jumps over the lazy dog. system user assistant tool name arguments function parameter description\n\n"
    'You are a helpful assistant. {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
    "I should look at the weather in the city that the user named. Then I can answer.\n\n"
    "def main(path: str) -> None:\n    with open(path) as f:\n        print(f.read())\n\n"
)

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\nFunction signatures are within <tools></tools> tags:\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools>\n\nReturn each call within <tool_call></tool_call> tags.<|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {%- set call = call.function %}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
"""Keeps thinking behind the last user message only; writes no thinking in the prompt."""

QWEN35 = r"""
{%- macro text(content) %}{{- content | trim }}{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools>\n\nCall as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}{{- '\n\n' + text(messages[0].content) }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + text(messages[0].content) + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- set content = text(message.content) %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = (message.reasoning_content or '') | trim %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}
            {%- if loop.first %}{{- '\n\n' if content else '' }}{%- else %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for key, value in call.arguments | items %}
                {{- '<parameter=' + key + '>\n' }}
                {%- if value is string %}{{- value }}{%- else %}{{- value | tojson }}{%- endif %}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and enable_thinking is false else '<think>\n' }}
{%- endif %}
"""
"""Trims every content, opens the thinking in the prompt, refuses late system messages, writes calls as tags."""

KEEPING = QWEN3.replace("loop.index0 > ns.last and (loop.last or reasoning)", "reasoning")
"""Keeps all thinking (what a template trained for agents does)."""

TEMPLATES = {"qwen3": QWEN3, "qwen35": QWEN35, "keeping": KEEPING}


@functools.cache
def tokenizer_json() -> str:
    base = BaseTokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    base.train_from_iterator([CORPUS] * 4, trainer)
    base.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in SPECIAL])
    base.add_tokens([AddedToken(t, normalized=False, special=False) for t in ORDINARY])
    return base.to_str()


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizer_json(), {"eos_token": "<|im_end|>"})


@functools.cache
def tokenizer_with(markers: tuple[str, ...], eos: str = "<|im_end|>") -> Tokenizer:
    """The same without Qwen's markers but for the end of a turn, and with these."""
    spec = json.loads(tokenizer_json())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] == "<|im_end|>"]
    base = BaseTokenizer.from_str(json.dumps(spec))
    base.add_tokens([AddedToken(t, normalized=False, special=False) for t in dict.fromkeys(markers)])
    return Tokenizer(base.to_str(), {"eos_token": eos})


FAMILIES = (*TEMPLATES, "demo")
"""Templates above, and the shipped model's own tokenizer and template; those of families.py have tests of their own."""


@functools.cache
def _loaded(family: str) -> ModelText:
    if family == "demo":
        return ModelText.load(Path(agentserve.__file__).parent / "demo_model")
    if family in OTHER_FAMILIES:
        template, markers, eos, _ = OTHER_FAMILIES[family]
        return ModelText(tokenizer_with(markers, eos), ChatTemplate(template, {"bos_token": markers[0]}))
    return ModelText(tokenizer(), ChatTemplate(TEMPLATES[family]))


def model(family: str = "qwen3", book: AliasBook | None = None) -> ModelText:
    """A ModelText of a family with its own alias book; the template is compiled and probed once."""
    text = copy.copy(_loaded(family))
    text.renderer = Renderer(text.tokenizer, text.planner, text.markers, book or NoAliases())
    return text
