"""Tools written as text, for a chat template that knows none: the form that Hermes and Qwen models are trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from cplus.data.examples import Message

_OFFER = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def as_text(messages: Sequence[Message], tools: str) -> list[Message]:
    """The same conversation of system, user and assistant alone, with everything about tools in their words.

    >>> calls = '[{"type": "function", "function": {"name": "add", "arguments": "{}"}}]'
    >>> as_text([Message(role="assistant", content="", calls=calls)], "")[0].content
    '<tool_call>\\n{"name": "add", "arguments": {}}\\n</tool_call>'
    """
    written: list[Message] = []
    for i, message in enumerate(messages):
        if message.role == "tool":
            result = f"<tool_response>\n{message.content}\n</tool_response>"
            if i > 0 and messages[i - 1].role == "tool":  # results of one turn's calls are one turn
                written[-1] = replace(written[-1], content=f"{written[-1].content}\n{result}")
            else:
                written.append(Message(role="user", content=result))
        else:
            calls = [_call(call["function"]) for call in json.loads(message.calls or "[]")]
            parts = [message.content] if message.content else []
            written.append(replace(message, content="\n".join([*parts, *calls]), calls=""))
    if tools:
        offer = _OFFER.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools)))
        if written and written[0].role == "system":
            written[0] = replace(written[0], content=f"{written[0].content}\n\n{offer}")
        else:
            written.insert(0, Message(role="system", content=offer))
    return written


def _call(function: dict[str, str]) -> str:
    called = {"name": function["name"], "arguments": json.loads(function["arguments"])}
    return f"<tool_call>\n{json.dumps(called, ensure_ascii=False)}\n</tool_call>"
