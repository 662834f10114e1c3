"""Prompts to the letter, targets to the token, and parsers that survive any text."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_uppercase
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cplus.data.examples import Choice, Example, FreeForm, Message
from cplus.data.interfaces import Rejected, build
from cplus.toy.pretrain import build_tokenizer

SKY = Choice(id="sky", question="What colour is the sky?", choices=("blue", "green", "red", "black"), answer=0)
DOG = Choice(id="dog", question="Which animal barks?", choices=("a cat", "a dog", "a cow", "an ant"), answer=1)
HELLO = FreeForm(id="hi", messages=(Message(role="user", content="Say hello."),), response="Hello.")
SPELL = FreeForm(id="sp", messages=(Message(role="user", content="Spell dog.\n\nSlowly."),), response="D, o, g.")

LETTER_TEXT = (
    "Question: What colour is the sky?\nOptions:\nA: blue\nB: green\nC: red\nD: black\n\n"
    "Please reply with only A, B, C, or D. Do not provide any explanation."
)


@pytest.fixture(scope="module")
def qwen(make_tiny: Callable[[str], Any]) -> Any:
    return make_tiny("qwen3").tokenizer


def test_letter_prompt_is_the_papers_in_qwen3s_template_with_thinking_off(qwen: Any) -> None:
    encoded = build("letter", qwen).encode(SKY)
    expected = f"<|im_start|>user\n{LETTER_TEXT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert qwen.decode(encoded.prompt) == expected
    assert qwen.decode(encoded.target) == "A"
    text = qwen.decode(build("letter", qwen, wording="medqa").prompt(SKY))
    assert "D: black\nPlease answer strictly with A, B, C, or D only. No explanation.<|im_end|>" in text


@pytest.mark.parametrize(("count", "spoken"), [(2, "only A or B."), (5, "A, B, C, D, or E.")])
def test_letters_follow_the_number_of_choices(qwen: Any, count: int, spoken: str) -> None:
    interface = build("letter", qwen)
    example = Choice(id="n", question="Which?", choices=tuple("pqrst"[:count]), answer=count - 1)
    assert spoken in qwen.decode(interface.prompt(example))
    assert [qwen.decode(tokens) for tokens in interface.candidates(example)] == list("ABCDE"[:count])
    assert interface.encode(example).target == interface.candidates(example)[-1]


def test_a_template_that_opens_the_text_is_not_opened_twice(make_tiny: Callable[[str], Any]) -> None:
    tokenizer = make_tiny("llama").tokenizer
    for name, example in (("letter", SKY), ("freeform", HELLO)):
        assert list(build(name, tokenizer).prompt(example)).count(tokenizer.bos_token_id) == 1


def sentencepiece(*words: str) -> Any:
    """A tokenizer that marks blanks as SentencePiece does and puts one before every text."""
    vocabulary = [("<unk>", 0.0), ("\u2581", -9.0), ("<end>", -1.0), *((word, -2.0) for word in words)]
    letters = [(letter, -8.0) for letter in "User:?Assistant\nRequest"]
    backend = Tokenizer(models.Unigram(list(dict(vocabulary + letters).items()), unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")


def test_letters_are_those_of_sentencepiece_after_the_prompt() -> None:
    tokenizer = sentencepiece("A", "B", "\u2581A", "\u2581B")
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    two = Choice(id="two", question="?", choices=("s", "t"), answer=1)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("A", add_special_tokens=False)) == ["\u2581A"]
    after_a_line = build("letter", tokenizer).candidates(two)
    assert [tokenizer.convert_ids_to_tokens(letter) for letter in after_a_line] == [["A"], ["B"]]
    after_a_blank = build("letter", tokenizer, chat=False).candidates(two)
    assert [tokenizer.convert_ids_to_tokens(letter) for letter in after_a_blank] == [["\u2581A"], ["\u2581B"]]


def test_letters_of_two_tokens_or_none_are_named() -> None:
    two = Choice(id="two", question="?", choices=("s", "t"), answer=1)
    with pytest.raises(ValueError, match=r"'A' to be one token after the prompt.*makes 2 of it.*; use the cloze"):
        build("letter", sentencepiece("A", "B"), chat=False).candidates(two)
    unknown = sentencepiece("\u2581A")
    unknown.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match=r"the letter 'B' to be one token .*makes 1 of it, '<unk>'; use the cloze"):
        build("letter", unknown).candidates(two)


REAL_LETTERS = {
    "smollm2-135m": (True, "<|im_start|>assistant\n", "{}"),
    "qwen2.5-coder-1.5b": (True, "<|im_start|>assistant\n", "{}"),
    "gemma-3-270m": (False, "\n\nAssistant:", "\u2581{}"),
}


@pytest.mark.packaged
@pytest.mark.parametrize("alias", REAL_LETTERS)
def test_letters_of_real_tokenizers(alias: str, packaged_folder: Callable[[str], Any]) -> None:
    chat, ending, written = REAL_LETTERS[alias]
    tokenizer = AutoTokenizer.from_pretrained(packaged_folder(alias))
    interface = build("letter", tokenizer, chat=chat)
    many = Choice(id="many", question="Which?", choices=tuple(f"no. {i}" for i in range(26)), answer=25)
    prompt = interface.prompt(many)
    assert tokenizer.decode(prompt).endswith(ending)
    for letter, tokens in zip(ascii_uppercase, interface.candidates(many), strict=True):
        assert tokenizer.convert_ids_to_tokens(tokens) == [written.format(letter)]
        # The model reads prompt and letter exactly as the tokenizer writes the whole text.
        whole = tokenizer.decode([*prompt, *tokens])
        assert tokenizer.encode(whole, add_special_tokens=False) == [*prompt, *tokens]
    cloze = build("cloze", tokenizer)
    assert (cloze.prompt(SKY)[0] == tokenizer.bos_token_id) == (alias == "gemma-3-270m")
    assert tokenizer.decode(cloze.candidates(SKY)[1]) == " green"


def test_plain_text_where_there_is_no_chat_template(make_tiny: Callable[[str], Any]) -> None:
    tokenizer = build_tokenizer()
    with pytest.raises(ValueError, match=r"chat template.*chat=False, or --set plain=true"):
        build("letter", tokenizer)
    encoded = build("freeform", tokenizer, chat=False).encode(HELLO)
    assert tokenizer.decode(encoded.prompt) == "User: Say hello.\n\nAssistant:"
    assert tokenizer.decode(encoded.target) == " Hello.<|endoftext|>"
    tokenizer = make_tiny("llama").tokenizer
    encoded = build("letter", tokenizer, chat=False).encode(SKY)
    assert tokenizer.decode(encoded.prompt) == f"User: {LETTER_TEXT}\n\nAssistant:"
    assert tokenizer.decode(encoded.target) == " A"  # a letter carries its blank


def test_unknown_names_rows_and_answers_of_the_wrong_kind_are_refused(qwen: Any) -> None:
    for name, wording, message in (("letters", "standard", "letter, cloze, freeform"), ("letter", "polite", "medqa")):
        with pytest.raises(ValueError, match=message):
            build(name, qwen, wording=wording)
    for name, example in (("letter", HELLO), ("cloze", HELLO), ("freeform", SKY)):
        with pytest.raises(TypeError, match=example.id):
            build(name, qwen).encode(example)
    wrong: list[tuple[str, int | str]] = [("letter", 4), ("letter", "A"), ("cloze", 4), ("cloze", " "), ("freeform", 1)]
    for name, answer in wrong:
        with pytest.raises(ValueError, match="expected"):
            build(name, qwen).with_answer(HELLO if name == "freeform" else SKY, answer)


def test_cloze_prompt_and_target_are_the_tokens_of_the_whole_text(tiny: Any) -> None:
    interface = build("cloze", tiny.tokenizer)
    encoded = interface.encode(DOG)
    whole = tiny.tokenizer.encode("Question: Which animal barks?\nAnswer: a dog", add_special_tokens=False)
    assert [*encoded.prompt, *encoded.target] == whole
    assert tiny.tokenizer.decode(encoded.target) == " a dog"
    assert interface.candidates(DOG)[1] == encoded.target


ENDS = {"qwen3": "<|im_end|>", "gemma2": "<end_of_turn>", "phi3": "<|end|>", "llama": "<|eot_id|>"}


def test_freeform_trains_on_the_response_and_the_end_of_its_turn(tiny: Any) -> None:
    interface = build("freeform", tiny.tokenizer)
    encoded = interface.encode(SPELL)
    assert tiny.tokenizer.decode(encoded.target) == f"D, o, g.{ENDS[tiny.family]}"
    assert tiny.tokenizer.decode(encoded.prompt) == tiny.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Spell dog.\n\nSlowly."}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert interface.answer_stop == (ENDS[tiny.family],)


def test_letter_request_shows_questions_without_answers_and_names_the_topic(qwen: Any) -> None:
    text = qwen.decode(build("letter", qwen).request([SKY, DOG], "music"))
    assert "Question: Which animal barks?\nOptions:\nA: a cat\nB: a dog" in text
    assert "about music" in text
    assert "lettered A to D" in text
    assert "Please reply with only" not in text


def test_requests_break_off_where_the_next_one_begins(qwen: Any) -> None:
    text = qwen.decode(build("cloze", qwen).request([SKY, DOG], None))
    assert text == (
        "Question: What colour is the sky?\nAnswer: blue\n\nQuestion: Which animal barks?\nAnswer: a dog\n\nQuestion:"
    )
    text = qwen.decode(build("freeform", qwen).request([HELLO, SPELL], None))
    assert text == "Request: Say hello.\n\n---\n\nRequest: Spell dog.\n\nSlowly.\n\n---\n\nRequest:"


GOOD = "Question: Why is snow white?\nOptions:\nA: light\nB: paint\nC: salt\nD: milk"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD, None),
        (f"<think>Let me see. A: x</think>\n```text\n{GOOD}\n```\nAnswer: A", None),
        (f"Sure! Here is one:\n\n{GOOD}\n\nThe correct answer is A.", None),
        ("**Question 3:** Why is snow white?\n(A) light\nB) paint\n- C. salt\n**D:** milk\n**Answer:** B", None),
        ("Why is snow white?\n\nA. light\nB. paint\nC. salt\nD. milk\nQuestion: And ice?\nA. x", None),
        ("Why is snow white?", "no options"),
        ("Why?\nA: light\nB: paint\nC: salt", "wrong number of options"),
        (f"{GOOD}\nE: wool", "wrong number of options"),
        ("Why?\nA: light\nB:\nC: salt\nD: milk", "empty option"),
        ("Why?\nA: light\nB: Light.\nC: salt\nD: milk", "repeated option"),
        ("Options:\nA: light\nB: paint\nC: salt\nD: milk", "empty"),
        ("what colour is the sky\nA: light\nB: paint\nC: salt\nD: milk", "copy of a shot"),
        ("Why<|im_end|>?\nA: light\nB: paint\nC: salt\nD: milk", "template token"),
        ("Why?\nA: light\nB: <|im_start|>\nC: salt\nD: milk", "template token"),
        (f"Why {'so ' * 200}?\nA: light\nB: paint\nC: salt\nD: milk", "too long"),
        ("<think>never ends\nWhy?\nA: light\nB: paint\nC: salt\nD: milk", "no options"),
    ],
)
def test_letter_reads_a_question_or_says_why_not(qwen: Any, text: str, reason: str | None) -> None:
    parsed = build("letter", qwen).parse(text, [SKY, DOG])
    if reason is not None:
        assert parsed == Rejected(reason)
        return
    assert isinstance(parsed, Choice)
    assert (parsed.question, parsed.choices) == ("Why is snow white?", ("light", "paint", "salt", "milk"))
    assert LETTER_TEXT.partition("\n\n")[2] in qwen.decode(build("letter", qwen).prompt(parsed))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("cloze", " Why is snow white?", "no end"),
        ("cloze", " Why is snow\nAnswer:", "no question mark"),
        ("cloze", "\n", "empty"),
        ("cloze", " WHICH animal barks ?\nAnswer:", "copy of a shot"),
        ("cloze", " Why? Answer: light?\nAnswer:", "runs on"),
        ("cloze", f" Why {'so ' * 200}?\nAnswer:", "too long"),
        ("cloze", " Why<|im_end|>?\nAnswer:", "template token"),
        ("freeform", " Count to ten.", "no end"),
        ("freeform", " say hello\n---", "copy of a shot"),
        ("freeform", "\n---", "empty"),
        ("freeform", " Count. Request: x\n---", "runs on"),
        ("freeform", " Count.<|im_end|>\n---", "template token"),
    ],
)
def test_cloze_and_freeform_say_why_not(qwen: Any, name: str, text: str, reason: str) -> None:
    shots = [SKY, DOG] if name == "cloze" else [HELLO, SPELL]
    assert build(name, qwen).parse(text, shots) == Rejected(reason)


@pytest.mark.parametrize("text", [" Why is snow white?\nAnswer:", " Why is snow white?\n\n"])
def test_cloze_reads_one_line(qwen: Any, text: str) -> None:
    interface = build("cloze", qwen)
    parsed = interface.parse(text, [SKY, DOG])
    assert isinstance(parsed, Choice)
    assert (parsed.question, parsed.choices) == ("Why is snow white?", ())
    assert interface.candidates(parsed) == ()
    with pytest.raises(ValueError, match="no answer yet"):
        interface.encode(parsed)
    assert qwen.decode(interface.encode(interface.with_answer(parsed, " light ")).target) == " light"


def test_cloze_reads_several_lines_where_the_shots_have_them(qwen: Any) -> None:
    shot = Choice(id="p", question="Snow fell.\nQuestion: Is it cold?", choices=("yes", "no"), answer=0)
    parsed = build("cloze", qwen).parse(" Rain fell.\nIs it wet?\nAnswer: yes", [shot])
    assert isinstance(parsed, Choice)
    assert parsed.question == "Rain fell.\nIs it wet?"


def test_freeform_reads_a_request(qwen: Any) -> None:
    interface = build("freeform", qwen)
    parsed = interface.parse(" Count to ten.\n\n---\n\nRequest: more", [HELLO, SPELL])
    assert isinstance(parsed, FreeForm)
    assert parsed.messages == (Message(role="user", content="Count to ten."),)
    answered = interface.with_answer(parsed, "1, 2, 3.")
    assert qwen.decode(interface.encode(answered).target) == "1, 2, 3.<|im_end|>"


def test_freeform_keeps_the_system_message_the_shots_share(qwen: Any) -> None:
    system = Message(role="system", content="Be brief.")
    shots = [FreeForm(id=s.id, messages=(system, *s.messages), response=s.response) for s in (HELLO, SPELL)]
    parsed = build("freeform", qwen).parse("Count.\n---", shots)
    assert isinstance(parsed, FreeForm)
    assert parsed.messages == (system, Message(role="user", content="Count."))


MARKUP = "Question:|Options:|\n|\n\n|A: |B. |C) |D: |E: |Answer:|---|?|why| snow|```|(A)|**|The correct answer is|\r"
PIECES = st.sampled_from([*MARKUP.split("|"), "<think>", "</think>", "<|im_end|>", "\u2028", "\x00", "é", "blue"])
WORDS = st.text(max_size=12)
NEARLY = st.lists(WORDS, min_size=5, max_size=5).map(
    lambda w: f"{w[0]} what?\nA: {w[1]}1\nB: {w[2]}2\nC: {w[3]}3\nD: {w[4]}4\nAnswer:\n---"
)
TEXTS = st.one_of(st.text(max_size=200), st.lists(PIECES, max_size=30).map("".join), NEARLY)


@pytest.mark.parametrize(
    ("name", "shots"), [("letter", [SKY, DOG]), ("cloze", [SKY, DOG]), ("freeform", [HELLO, SPELL])]
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_any_text_is_an_example_or_a_reason(qwen: Any, name: str, shots: list[Example], text: str) -> None:
    interface = build(name, qwen)
    parsed = interface.parse(text, shots)
    if isinstance(parsed, Rejected):
        assert parsed.reason
        return
    answered = interface.with_answer(parsed, 0 if name == "letter" else "so")
    encoded = interface.encode(answered)
    assert encoded.prompt == interface.prompt(parsed)
    # What the parser accepts adds no control token of its own.
    blank = interface.encode(interface.with_answer(shots[0], 0 if name == "letter" else "so"))
    specials = set(qwen.all_special_ids)
    assert sum(t in specials for t in encoded.prompt) == sum(t in specials for t in blank.prompt)
    if isinstance(parsed, Choice) and name == "letter":
        assert len({choice.strip().casefold() for choice in parsed.choices}) == 4
        assert all(choice.strip() for choice in parsed.choices)
