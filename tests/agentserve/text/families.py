"""Small chat templates of the other families: the rules of theirs (roles, markers, where thinking stays), in our own words."""

from __future__ import annotations

_LAST_USER = """
{%- set ns = namespace(last=-1, results=false) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
"""

GLM = (
    "[gMASK]<sop>"
    + _LAST_USER
    + """
{%- if tools %}
    {{- '<|system|>\n# Tools\n\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + (tool | tojson(ensure_ascii=False)) }}{%- endfor %}
    {{- '\n</tools>\n\nCall as <tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|user|>\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last and m.reasoning_content %}
            {{- '\n<think>' + m.reasoning_content | trim + '</think>' }}
        {%- else %}
            {{- '\n<think></think>' }}
        {%- endif %}
        {%- if m.content | trim %}{{- '\n' + m.content | trim }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<tool_call>' + call.function.name + '\n' }}
            {%- for k, v in call.function.arguments | items %}
                {{- '<arg_key>' + k + '</arg_key>\n<arg_value>' }}
                {{- v if v is string else v | tojson(ensure_ascii=False) }}
                {{- '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- elif m.role == 'system' %}
        {{- '<|system|>\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {{- '\n<think></think>' if enable_thinking is defined and enable_thinking is false else '' }}
{%- endif %}
"""
)
"""No marker ends a turn: the next role's does."""

_DEEPSEEK = (
    "{{- bos_token }}"
    + _LAST_USER
    + """
{%- for m in messages %}{%- if m.role == 'system' and loop.first %}{{- m.content }}{%- endif %}{%- endfor %}
{%- if tools %}
    {{- '\n\n## Tools\n' }}
    {%- for tool in tools %}{{- '\n' + (tool.function | tojson) }}{%- endfor %}
    {{- '\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<｜Assistant｜>' }}{%- endif %}
        {%- if loop.index0 > ns.last and m.reasoning_content %}
            {{- '<think>' + m.reasoning_content + '</think>' }}
        {%- elif loop.first or loop.previtem.role != 'tool' %}
            {{- '</think>' }}
        {%- endif %}
        {{- m.content or '' }}
        CALLS
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        RESULTS
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
    {{- '<｜Assistant｜>' + ('<think>' if thinking is not defined or thinking else '</think>') }}
{%- endif %}
"""
)

DEEPSEEK_V3 = _DEEPSEEK.replace(
    "CALLS",
    """
        {%- if m.tool_calls %}
            {{- '<｜tool▁calls▁begin｜>' }}
            {%- for call in m.tool_calls %}
                {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
                {{- call.function.arguments | tojson }}
                {{- '<｜tool▁call▁end｜>' }}
            {%- endfor %}
            {{- '<｜tool▁calls▁end｜>' }}
        {%- endif %}""",
).replace("RESULTS", "{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}")
"""After tool results the answer goes on without a header of its own."""

DSML = (
    _DEEPSEEK.replace(
        "CALLS",
        """
        {%- if m.tool_calls %}
            {{- '\n\n<｜DSML｜function_calls>\n' }}
            {%- for call in m.tool_calls %}
                {{- '<｜DSML｜invoke name="' + call.function.name + '">\n' }}
                {%- for k, v in call.function.arguments | items %}
                    {{- '<｜DSML｜parameter name="' + k + '" string="' + ('true' if v is string else 'false') + '">' }}
                    {{- v if v is string else v | tojson }}
                    {{- '</｜DSML｜parameter>\n' }}
                {%- endfor %}
                {{- '</｜DSML｜invoke>\n' }}
            {%- endfor %}
            {{- '</｜DSML｜function_calls>' }}
        {%- endif %}""",
    )
    .replace(
        "RESULTS",
        """
        {%- if loop.previtem.role != 'tool' %}{{- '\n\n<function_results>' }}{%- endif %}
        {{- '\n<result>' + m.content + '</result>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '\n</function_results>\n\n' }}{%- endif %}""",
    )
    .replace(
        "{%- if add_generation_prompt and",
        "{%- if add_generation_prompt and messages[-1].role == 'tool' %}{{- '<think>' }}{%- elif add_generation_prompt and",
    )
)

MISTRAL = (
    "{{- bos_token }}"
    + _LAST_USER
    + """
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- endif %}
    {%- if tools and loop.index0 == ns.last %}
        {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.reasoning_content and loop.index0 > ns.last %}{{- '[THINK]' + m.reasoning_content + '[/THINK]' }}{%- endif %}
        {{- m.content or '' }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
)
"""Nothing marks where an answer begins, and the tools move to the newest user message."""

KIMI = (
    _LAST_USER
    + """
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|im_user|>user<|im_middle|>' + m.content + '<|im_end|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_assistant|>assistant<|im_middle|>' }}
        {%- if loop.index0 > ns.last and m.reasoning_content %}
            {{- '<think>' + m.reasoning_content + '</think>' }}
        {%- else %}
            {{- '<think></think>' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
                {{- call.function.arguments | tojson }}
                {{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
        {{- '<|im_end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\n' + m.content + '<|im_end|>' }}
    {%- else %}
        {{- '<|im_system|>system<|im_middle|>' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}
"""
)
"""Names a call by its id, which holds the tool's name."""

MINIMAX = (
    _LAST_USER
    + """
{{- ']~!b[]~b]system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n<tool>' + (tool.function | tojson) + '</tool>' }}{%- endfor %}
    {{- '\n</tools>\n' }}
{%- endif %}
{{- '[e~[\n' }}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- ']~b]user\n' + m.content + '[e~[\n' }}
    {%- elif m.role == 'assistant' %}
        {{- ']~b]ai\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content or '' }}
        {%- if m.tool_calls %}
            {{- '\n<minimax:tool_call>\n' }}
            {%- for call in m.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\n' }}
                {%- for k, v in call.function.arguments | items %}
                    {{- '<parameter name="' + k + '">' + (v if v is string else v | tojson) + '</parameter>\n' }}
                {%- endfor %}
                {{- '</invoke>\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- ']~b]tool' }}{%- endif %}
        {{- '\n<response>' + m.content + '</response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '[e~[\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{%- endif %}
"""
)

HARMONY = (
    _LAST_USER
    + """
{{- '<|start|>system<|message|>You are a model. Channels: analysis, commentary, final.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|>' }}
    {%- if messages[0].role == 'system' %}{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\n\nnamespace functions {\n' }}
        {%- for tool in tools %}{{- tool.function | tojson + '\n' }}{%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set name = namespace(last='') %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{- raise_exception('Content and thinking in one message with calls') }}{%- endif %}
        {%- if m.thinking and loop.index0 > ns.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- elif m.content %}
            {{- '<|start|>assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {%- set name.last = call.function.name %}
            {{- '<|start|>assistant<|channel|>commentary to=functions.' + call.function.name }}
            {{- ' <|constrain|>json<|message|>' + (call.function.arguments | tojson) + '<|call|>' }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {%- if m.thinking and loop.index0 > ns.last %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
        {%- endif %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + name.last + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
)
"""Thinking has a key of its own, and no message may have thinking, text and calls at once."""

_THINK = ("<think>", "</think>")
_DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", *_THINK)
OTHER_FAMILIES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "glm": (
        GLM,
        (
            *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", *_THINK),
            *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            *("<tool_response>", "</tool_response>"),
        ),
        "<|endoftext|>",
        "glm",
    ),
    "deepseek_v3": (
        DEEPSEEK_V3,
        (
            *(
                *_DEEPSEEK_TOKENS,
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
                "<｜tool▁call▁begin｜>",
                "<｜tool▁call▁end｜>",
            ),
            *("<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
        ),
        "<｜end▁of▁sentence｜>",
        "deepseek_v3",
    ),
    "dsml": (DSML, (*_DEEPSEEK_TOKENS, "｜DSML｜"), "<｜end▁of▁sentence｜>", "deepseek_dsml"),
    "mistral": (
        MISTRAL,
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]"),
        ),
        "</s>",
        "mistral",
    ),
    "kimi": (
        KIMI,
        (
            *("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", *_THINK),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
            "<|tool_call_argument_begin|>",
        ),
        "<|im_end|>",
        "kimi_k2",
    ),
    "minimax": (
        MINIMAX,
        ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>", *_THINK),
        "[e~[",
        "minimax",
    ),
    "harmony": (
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
        "<|return|>",
        "harmony",
    ),
}
"""Template, markers of the tokenizer, its eos, and the dialect that must be found."""
