"""The built-in world: its facts, its tokenizer, its text, and the models that ship with the package."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from cplus import toy
from cplus.base.files import fingerprint, sha256_file
from cplus.data.examples import to_row
from cplus.toy import pretrain, rows, world
from cplus.toy.pretrain import build_tokenizer

TOKENIZER = build_tokenizer()


def test_facts_are_well_formed_distinct_and_taught_or_not() -> None:
    facts = [fact for domain in world.DOMAINS for fact in world.examples(domain)]
    assert len(facts) == 4 * 2560
    assert len({fact.id for fact in facts}) == len({fact.question for fact in facts}) == len(facts)
    for domain in world.DOMAINS:
        relations = world.domain_named(domain).relations
        for fact in world.examples(domain):
            name, _, relation = fact.id.split("-")
            assert name == domain
            assert len(set(fact.choices)) == 4
            assert set(fact.choices) <= set(relations[relation][1])
        shown, hidden = world.taught(domain), world.untaught(domain)
        assert len(shown) == 1792
        assert sorted(fact.id for fact in shown + hidden) == sorted(fact.id for fact in world.examples(domain))


def test_a_name_does_not_give_the_answer_away_and_the_weights_belong_to_this_world() -> None:
    # Right answers fall evenly on positions and values, so nothing but memory answers better than one in four.
    facts = world.examples("harbours")
    positions = [sum(fact.answer == place for fact in facts) / len(facts) for place in range(4)]
    assert all(0.22 < share < 0.28 for share in positions)
    exports = [fact.right for fact in facts if fact.id.endswith("-export")]
    assert max(exports.count(value) for value in set(exports)) < 0.15 * len(exports)
    # A change of one word makes the shipped weights worthless: rebuild all three sizes, then change this.
    every = [to_row(fact) for domain in world.DOMAINS for fact in world.examples(domain)]
    assert fingerprint(every) == "5b7a67d7472ef80a9bead45fda8366ecca34d6b4b529e5f5525d16ad2d4f9dd6"
    assert sum(path.stat().st_size for name in toy.NAMES for path in toy.folder(name).iterdir()) < 8_000_000


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"harbours, craftsmen, plants, machines.*got 'cities'"):
        world.examples("cities")
    with pytest.raises(ValueError, match=r"toy-s, toy, toy-l.*got 'toy-xl'"):
        toy.folder("toy-xl")
    with pytest.raises(ValueError, match="toy-xl"):
        pretrain.pretrain("toy-xl", Path("unused"))


def test_words_are_single_tokens_and_answers_do_not_move_the_prompt() -> None:
    for domain in world.DOMAINS:
        for fact in random.Random(0).sample(world.examples(domain), 50):
            question, value, end = world.prompt(fact.question), f" {fact.right}", "\n\n"
            parts = [TOKENIZER(text)["input_ids"] for text in (question, value, end)]
            assert [len(parts[1]), len(parts[2])] == [1, 1]
            assert TOKENIZER(world.line(fact))["input_ids"] == [token for part in parts for token in part]
    assert all(len(TOKENIZER(f" {word}")["input_ids"]) == 1 for word in world.words())


@given(st.text(max_size=40))
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_documents_keep_to_one_domain_and_show_every_taught_fact_once_a_pass() -> None:
    stream = pretrain.documents(TOKENIZER, torch.Generator().manual_seed(3))
    texts = [TOKENIZER.decode(document) for document in islice(stream, 4 * 1792 // pretrain.LINES)]
    where = {world.line(fact): domain for domain in world.DOMAINS for fact in world.taught(domain)}
    seen = []
    for text in texts:
        lines = [f"{part}\n\n" for part in text.split("\n\n") if part]
        assert len({where[line] for line in lines}) == 1
        seen += lines
    assert sorted(seen) == sorted(where)


@pytest.mark.parametrize("name", toy.NAMES)
def test_shipped_model_knows_what_it_was_taught(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(toy.folder(name), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(toy.folder(name))
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
    draw = random.Random(1)
    for domain in world.DOMAINS:
        assert pretrain.recall(model, tokenizer, draw.sample(world.taught(domain), 60)) > 0.97
        assert pretrain.recall(model, tokenizer, draw.sample(world.untaught(domain), 60)) < 0.2


def test_pretraining_is_deterministic_and_leaves_a_folder_that_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pretrain.SIZES, "toy-s", replace(pretrain.SIZES["toy-s"], steps=2, layers=1))
    monkeypatch.setattr(pretrain, "LINES", 2)
    monkeypatch.setattr(pretrain, "BATCH", 16)
    monkeypatch.setattr(pretrain, "DOMAINS", ("plants",))
    for name in ("one", "two"):
        torch.rand(1)  # the global state must not matter
        pretrain.pretrain("toy-s", tmp_path / name, seed=5)
    assert sha256_file(tmp_path / "one" / "model.safetensors") == sha256_file(tmp_path / "two" / "model.safetensors")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").config.num_hidden_layers == 1


def test_the_rows_to_begin_with_are_those_of_the_examples_and_replace_nothing_else(tmp_path: Path) -> None:
    examples = Path(__file__).parent.parent / "examples" / "rows"
    rows.write(tmp_path)
    for path in examples.glob("*.jsonl"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()
    rows.write(tmp_path)  # again: the same bytes
    (tmp_path / "keep.jsonl").write_text("mine")
    with pytest.raises(SystemExit, match=r"keep\.jsonl holds other rows; give an empty folder"):
        rows.write(tmp_path)
    assert (tmp_path / "keep.jsonl").read_text() == "mine"
