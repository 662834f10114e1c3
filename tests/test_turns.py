"""Every assistant turn of a conversation is a target, and nothing else is, under the chat templates of real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import GEMMA2_TEMPLATE
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.data.examples import Choice, FreeForm, Message
from cplus.data.formats import from_row
from cplus.data.interfaces import build, tokens_by_role
from cplus.models.scoring import log_likelihoods

# The templates of the models' own tokenizers, without what no test here reaches.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1, seeking=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.seeking and message.role == 'user' %}
        {%- set ns.seeking = false %}{%- set ns.last = messages|length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
GEMMA2 = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    f"{GEMMA2_TEMPLATE}"
)
# Writes the calls of a turn in place of its words, and drops what was said first.
LLAMA31 = (
    "{{ bos_token }}{% if tools %}"
    "{{ '<|start_header_id|>system<|end_header_id|>\n\n' + tools | tojson + '<|eot_id|>' }}"
    "{% endif %}{% for m in messages %}{% if m.tool_calls %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
    "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
TEMPLATES = {
    "smollm2": ("qwen3", SMOLLM2),
    "qwen3": ("qwen3", QWEN3),
    "gemma2": ("gemma2", GEMMA2),
    "llama31": ("llama", LLAMA31),
}
ENDS = {"smollm2": "<|im_end|>", "qwen3": "<|im_end|>", "gemma2": "<end_of_turn>", "llama31": "<|eot_id|>"}


# How Qwen's and Llama 3's tokenizers split a text: line breaks stay together, whatever follows them.
SPLITS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def talk(*turns: tuple[str, str], id: str = "talk", **more: Any) -> FreeForm:
    messages = [{"role": role, "content": content} for role, content in turns]
    example = from_row({"id": id, "messages": messages, **more}, where="here", id="x")
    assert isinstance(example, FreeForm)
    return example


TWO = talk(("user", "Hi there."), ("assistant", "Hello."), ("user", "And now?"), ("assistant", "Good bye."))


@pytest.fixture
def tokenizer(make_tiny: Callable[[str], Any]) -> Callable[[str], Any]:
    def of(name: str) -> Any:
        family, template = TEMPLATES[name]
        found = make_tiny(family).tokenizer
        found.chat_template = template
        if name in ("qwen3", "llama31"):
            found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(SPLITS), behavior="isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        return found

    return of


def learned(tokenizer: Any, row: Encoded) -> list[str]:
    """The texts of the scored stretches."""
    texts: list[list[int]] = []
    marks = row.scored or (True,) * len(row.target)
    for i, (token, scored) in enumerate(zip(row.target, marks, strict=True)):
        if scored:
            if i == 0 or not marks[i - 1]:
                texts.append([])
            texts[-1].append(token)
    return [tokenizer.decode(tokens) for tokens in texts]


def whole(tokenizer: Any, example: FreeForm) -> list[int]:
    """The tokens that the template writes for the whole conversation."""
    turns = [{"role": turn.role, "content": turn.content} for turn in example.turns]
    text = tokenizer.apply_chat_template(turns, tokenize=False, enable_thinking=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def learns_both_answers_and_nothing_else(own: Any, end: str) -> Encoded:
    """The row of two turns, which is the beginning of what the template writes."""
    row = build("freeform", own).encode(TWO)
    assert learned(own, row) == [f"Hello.{end}", f"Good bye.{end}"]
    rendered = whole(own, TWO)
    assert [*row.prompt, *row.target] == rendered[: len(row)]
    assert own.decode(rendered[len(row) :]).strip() == ""
    assert learned(own, build("freeform", own, turns="last").encode(TWO)) == [f"Good bye.{end}"]
    return row


@pytest.mark.parametrize("name", TEMPLATES)
def test_both_answers_of_two_turns_are_learned_and_nothing_else(tokenizer: Any, name: str) -> None:
    own = tokenizer(name)
    row = learns_both_answers_and_nothing_else(own, ENDS[name])
    assert own.decode(row.prompt).endswith(("assistant\n", "model\n", "<|end_header_id|>\n\n"))
    assert "Hello" not in own.decode(row.prompt)
    assert "Hi there." in own.decode(row.prompt)
    last = build("freeform", own, turns="last")
    assert last.encode(TWO).prompt == last.prompt(TWO) == build("freeform", own).prompt(TWO)


@pytest.mark.packaged
@pytest.mark.parametrize(
    "alias",
    ["smollm2-135m", "qwen2.5-coder-1.5b", pytest.param("gemma-3-270m", marks=pytest.mark.long)],  # 33 MB of tokens
)
def test_both_answers_under_the_tokenizers_of_the_packaged_files(
    packaged_folder: Callable[[str], Path], alias: str
) -> None:
    """Tokenizer and chat template as their GGUF files hold them; no weight is read."""
    own = AutoTokenizer.from_pretrained(packaged_folder(alias))
    if alias.startswith("gemma"):  # the file of the pretrained model has no template: the one of its family
        assert own.chat_template is None
        own.chat_template = GEMMA2
    learns_both_answers_and_nothing_else(own, "<end_of_turn>" if alias.startswith("gemma") else "<|im_end|>")


def test_thoughts_are_learned_where_the_template_writes_them_and_off_unless_kept(tokenizer: Any) -> None:
    own = tokenizer("qwen3")
    thought = "<think>\nWell.\n</think>\n\n"
    kept, off = build("freeform", own, thinking="keep"), build("freeform", own)
    example = talk(
        ("user", "Hi."), ("assistant", f"{thought}Hello."), ("user", "And?"), ("assistant", f"{thought}Bye.")
    )
    row = off.encode(example)
    assert learned(own, row) == ["Hello.<|im_end|>", f"{thought}Bye.<|im_end|>"]
    assert [*row.prompt, *row.target] == whole(own, example)[: len(row)]
    with_thought, without = (talk(("user", "Hi."), ("assistant", f"{words}Bye.")) for words in (thought, ""))
    assert own.decode(kept.prompt(without)).endswith("<|im_start|>assistant\n")
    assert own.decode(off.prompt(without)).endswith("<think>\n\n</think>\n\n")
    assert learned(own, kept.encode(with_thought)) == [f"{thought}Bye.<|im_end|>"]
    assert kept.encode(with_thought).prompt == kept.prompt(with_thought)
    assert kept.encode(without) == off.encode(without)  # the template writes an empty thought, which is not learned
    with pytest.raises(ValueError, match="expected thinking to be one of off, keep, got 'on'"):
        build("freeform", own, thinking="on")


def test_words_that_a_template_trims_are_learned_trimmed(tokenizer: Any) -> None:
    own = tokenizer("gemma2")
    example = talk(("user", "Hi."), ("assistant", " \n Hello. \n"), ("user", "And?"), ("assistant", "Bye.\n"))
    row = build("freeform", own).encode(example)
    assert learned(own, row) == ["Hello.<end_of_turn>", "Bye.<end_of_turn>"]


def test_a_tokenizer_that_merges_across_a_border_reads_the_same_text(make_tiny: Callable[[str], Any]) -> None:
    """The tokens before each answer are then those that the model reads when it is asked."""
    own = make_tiny("llama").tokenizer  # it writes two line breaks as one token only at the end of a text
    interface = build("freeform", own)
    row = interface.encode(TWO)
    rendered = whole(own, TWO)
    assert own.decode([*row.prompt, *row.target]) == own.decode(rendered)
    assert [*row.prompt, *row.target] != rendered
    assert row.prompt == interface.prompt(replace(TWO, messages=TWO.messages[:1]))
    assert learned(own, row) == ["Hello.<|eot_id|>", "Good bye.<|eot_id|>"]


def test_a_turn_of_weight_0_is_read_only(tokenizer: Any) -> None:
    own = tokenizer("smollm2")
    first, said, asked = TWO.messages
    example = replace(TWO, messages=(first, replace(said, trained=False), asked))
    row = build("freeform", own).encode(example)
    assert learned(own, row) == ["Good bye.<|im_end|>"]
    three = replace(TWO, messages=(first, said, asked, replace(said, content="No.", trained=False), asked))
    row = build("freeform", own).encode(three)
    assert learned(own, row) == ["Hello.<|im_end|>", "Good bye.<|im_end|>"]
    assert "No.<|im_end|>" in own.decode(row.target)


def test_plain_text_learns_each_turn_and_ends_the_last(make_tiny: Callable[[str], Any]) -> None:
    own = make_tiny("llama").tokenizer
    interface = build("freeform", own, chat=False)
    row = interface.encode(TWO)
    assert own.decode([*row.prompt, *row.target]) == (
        "User: Hi there.\n\nAssistant: Hello.\n\nUser: And now?\n\nAssistant: Good bye.<|eot_id|>"
    )
    assert learned(own, row) == [" Hello.", " Good bye.<|eot_id|>"]


def test_what_a_template_refuses_is_named_with_the_row(tokenizer: Any) -> None:
    refused = r"the chat template refuses this conversation of"
    system = talk(("system", "Be brief."), ("user", "a"), ("assistant", "b"), id="row-7")
    said_first = talk(("assistant", "a"), ("user", "b"), ("assistant", "c"), id="row-8")
    unanswered = FreeForm(id="row-9", messages=(Message(role="user", content="a"),), response="")
    for name, example, message in (
        ("gemma2", system, f"row-7: {refused} system, user.*: System role not .*--set plain=true"),
        ("gemma2", said_first, f"row-8: {refused} assistant, user, assistant: .*must alternate"),
        ("smollm2", unanswered, "row-9: this request has no response yet"),
    ):
        with pytest.raises(ValueError, match=message):
            build("freeform", tokenizer(name)).encode(example)


def test_a_template_that_hides_a_turn_is_named_with_the_remedy(tokenizer: Any) -> None:
    own = tokenizer("smollm2")
    every = "{% for m in messages %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    for template in (
        every.replace("messages", "messages[-2:]"),  # drops earlier turns
        "{{ messages[1].content | length }}" + every,  # what it writes before depends on the turn, or after
        every + "{{ messages[1].content }}",
    ):
        own.chat_template = template
        with pytest.raises(ValueError, match=r"talk: the chat template writes turn 1 so that .* turns=last"):
            build("freeform", own).encode(TWO)
        assert learned(own, build("freeform", own, turns="last").encode(TWO)) == ["Good bye.<|im_end|>"]


# Tools

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c12345678", "type": "function", "function": {"name": "add", "arguments": '{"b": 2, "a": 1}'}}
SUM = from_row(
    {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c12345678", "content": "3"},
            {"role": "assistant", "content": "It is 3."},
        ],
        "tools": [TOOL],
    },
    where="here",
    id="sum",
)


@pytest.mark.parametrize(
    ("name", "call", "offer"),
    [
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call><|im_end|>', True),
        ("llama31", '{"name": "add", "parameters": {"b": 2, "a": 1}}<|eot_id|>', True),
        ("smollm2", '<tool_call>\n{"name": "add", "arguments": {"b": 2, "a": 1}}\n</tool_call><|im_end|>', False),
    ],
)
def test_tool_calls_are_learned(tokenizer: Any, name: str, call: str, offer: bool) -> None:
    own = tokenizer(name)
    interface: Any = build("freeform", own)
    assert interface.form.knows_tools is offer
    row = interface.encode(SUM)
    # Qwen3 writes an empty thought before its last answer.
    assert learned(own, row) == [call, f"It is 3.{ENDS[name]}"]
    assert '"name": "add"' in own.decode(row.prompt)
    text = own.decode(row.target)
    assert text.index("add") < text.index("3") < text.index("It is")
    called = FreeForm(id="call", messages=SUM.messages[:1], response="", calls=SUM.messages[1].calls, tools=SUM.tools)
    row = interface.encode(called)
    assert learned(own, row) == [call]
    assert row.scored == ()


def test_tools_in_plain_text_and_under_a_template_without_a_system_role(tokenizer: Any) -> None:
    own = tokenizer("gemma2")
    text = own.decode(build("freeform", own, chat=False).prompt(SUM))
    assert text.startswith("System: # Tools\n")
    assert "User: <tool_response>\n3\n</tool_response>\n\nAssistant:" in text
    with pytest.raises(ValueError, match="sum: the chat template refuses this conversation of system, user"):
        build("freeform", own).encode(SUM)


# Plain text


def test_text_is_learned_from_its_first_token_on(make_tiny: Callable[[str], Any]) -> None:
    text = FreeForm(id="t", messages=(), response="Fish live in water.")
    for family, chat in (("llama", True), ("llama", False), ("qwen3", True)):
        own = make_tiny(family).tokenizer
        row = build("freeform", own, chat=chat).encode(text)
        assert own.decode([*row.prompt, *row.target]) == "Fish live in water."
        assert len(row.prompt) == 1
        assert row.prompt == build("freeform", own, chat=chat).prompt(text)
    with pytest.raises(ValueError, match=r"t: expected a text of at least two tokens, got '\?'"):
        build("freeform", own).encode(replace(text, response="?"))
    with pytest.raises(ValueError, match="t: expected a conversation with a user turn"):
        build("freeform", own).request([text], None)


# Counting and scoring


def test_tokens_by_role_add_up(tokenizer: Any) -> None:
    own = tokenizer("smollm2")
    system = replace(TWO, id="s", messages=(Message(role="system", content="Be brief."), *TWO.messages))
    rows = [TWO, system, SUM]
    interface = build("freeform", own)
    counts = tokens_by_role(interface, rows)
    encoded = [interface.encode(row) for row in rows]
    assert sum(counts.values()) == sum(map(len, encoded))
    assert counts["assistant"] == sum(row.num_scored for row in encoded) < sum(len(row.target) for row in encoded)
    assert counts["system"] == len(own.encode("Be brief."))
    assert counts["user"] == 2 * (len(own.encode("Hi there.")) + len(own.encode("And now?"))) + len(
        own.encode("1 + 2?")
    )
    assert counts["tool"] == 1
    last = tokens_by_role(build("freeform", own, turns="last"), [TWO])
    assert last["assistant"] == len(own.encode("Hello.")) + len(own.encode("Good bye.<|im_end|>"))
    text = FreeForm(id="t", messages=(), response="Fish live in water.")
    assert tokens_by_role(interface, [text]) == {"text": len(own.encode(text.response))}
    choice = Choice(id="q", question="Is it?", choices=("yes", "no"), answer=0)
    letter = build("letter", own)
    assert tokens_by_role(letter, [choice]) == {"user": len(letter.prompt(choice)), "assistant": 1}


def test_only_the_assistants_tokens_are_scored(make_tiny: Callable[[str], Any]) -> None:
    tiny = make_tiny("qwen3")
    tiny.tokenizer.chat_template = SMOLLM2
    row = build("freeform", tiny.tokenizer).encode(TWO)
    ids = torch.tensor([[*row.prompt, *row.target]])
    with torch.inference_mode():
        logits = tiny.model(ids).logits[0].float().log_softmax(-1)
    at = [len(row.prompt) + i for i, scored in enumerate(row.scored) if scored]
    expected = torch.stack([logits[place - 1, ids[0, place]] for place in at])
    (score,) = log_likelihoods(tiny.model, [row])
    assert score.num_tokens == row.num_scored == len(at) < len(row.target)
    assert score.total == pytest.approx(expected.sum().item(), rel=1e-4)
    with torch.inference_mode():
        assert answer_losses(tiny.model, [row]).item() == pytest.approx(-expected.mean().item(), rel=1e-4)
