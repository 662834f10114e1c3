"""Data: files, tasks, splits, anchors."""

from __future__ import annotations

import gzip
import json
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app
from cplus.core.rows import Encoded, fit
from cplus.data import readers
from cplus.data.examples import Choice, FreeForm, Message, Prediction, from_row, to_row
from cplus.data.readers import read_file
from cplus.data.tasks import (
    EXTERNAL,
    FREEFORM,
    PAPER,
    TASKS,
    TRAINING,
    cached_split,
    draw_anchors,
    draw_mixture,
    load_split,
    load_task,
    save_split,
    split,
    stack,
)

ROW = {"id": "q1", "question": "Is ice cold?", "choices": ["yes", "no"], "answer": 0}


def line(**changes):
    return json.dumps({**ROW, **changes})


def write(tmp_path, *lines, name="rows.jsonl"):
    path = tmp_path / name
    path.write_bytes("\n".join(lines).encode() if all(isinstance(x, str) for x in lines) else b"\n".join(lines))
    return path


def predicted(example, answer):
    return Prediction(
        id=example.id, answer=answer, correct=answer == example.answer, confidence=1.0, scores=(), num_tokens=()
    )


# Reading


def test_three_shapes_and_default_ids(tmp_path):
    assert read_file(write(tmp_path, line(), "", line(id=7))) == [
        Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=0),
        Choice(id="7", question="Is ice cold?", choices=("yes", "no"), answer=0),
    ]
    (one,) = read_file(write(tmp_path, '{"prompt": "Hi", "response": "Hello.\\u2028 You."}'))
    assert (one.id, one.response) == ("rows-0001", "Hello.\u2028 You.")
    chat = {"messages": [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user", "assistant")]}
    (two,) = read_file(write(tmp_path, json.dumps(chat)))
    assert [m.role for m in two.messages] == ["system", "user", "assistant", "user"]
    assert two.response == "a"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((line(), "{broken"), r"rows\.jsonl:2: expected JSON"),
        ((line(), "", "[1]"), r"rows\.jsonl:3: expected a JSON object, got list"),
        (("[" * 100_000,), r"rows\.jsonl:1: expected JSON"),
        ((line(answer=2),), r"rows\.jsonl:1: expected answer to be an index from 0 to 1, got 2"),
        ((line(answer=True),), "index from 0 to 1, got True"),
        ((line(answer="A"),), "index from 0 to 1, got 'A'"),
        ((line(choices=[]),), "expected a list of choices"),
        ((line(choices=["yes"]),), "at least two choices"),
        ((line(choices=["yes", " "]),), "choice 1: expected a non-empty string"),
        ((line(question=""),), "question: expected a non-empty string"),
        ((line(question="\ud800"),), "half of a surrogate pair"),
        ((line(id=None),), "expected id to be"),
        ((line(), line()), r"rows\.jsonl:2: the id 'q1' was given before, at .*rows\.jsonl:1"),
        ((line(), '{"prompt": "a", "response": "b"}'), r"rows\.jsonl:2: expected one format in a file"),
        (('{"text": "a", "label": 1}',), "expected the keys question, choices, answer; .* found label, text"),
        (('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',), "last turn"),
        (("", "  "), "expected at least one example, but it is empty"),
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_file(write(tmp_path, *lines))


def test_bad_bytes_missing_file_and_unknown_ending(tmp_path):
    path = write(tmp_path, line().encode(), b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: expected UTF-8 text, got the byte 0xff"):
        read_file(path)
    with pytest.raises(ValueError, match="no such file"):
        read_file(tmp_path / "none.csv")
    with pytest.raises(ValueError, match=r"ending in \.jsonl"):
        read_file(tmp_path / "rows.xml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", '{"prompt": "p", "prompt": "q", "response": "r"}'),
        ("a.json", '[{"messages": [{"role": "user", "role": "user", "content": "c"}]}]'),
        ("a.csv", "prompt,response,prompt\np,r,q\n"),
    ],
)
def test_a_name_given_twice_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}.*expected each name once, got '(prompt|role)' 2 times"):
        read_file(tmp_path / name)


def test_a_packed_file_that_is_no_text_is_not_unpacked_to_its_end(tmp_path):
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write(bytes(2**27))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: expected text, which unpacks to less than 67,108,864 bytes"):
        read_file(tmp_path / "a.jsonl.gz")


def test_csv_with_mark_and_line_breaks(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffquestion,choices,answer\r\n"Is\nice cold?","[""yes"", ""no""]",1\r\n'.encode())
    assert read_file(path) == [Choice(id="rows-0001", question="Is\nice cold?", choices=("yes", "no"), answer=1)]
    path.write_text("prompt,response\nHi,Hello\nHi\n")
    with pytest.raises(ValueError, match=r"rows\.csv:3: expected 2 cells"):
        read_file(path)
    path.write_text('question,choices,answer\nq,"yes, no",1\n')
    with pytest.raises(ValueError, match=r"rows\.csv:2: choices: expected JSON"):
        read_file(path)
    path.write_text('prompt,response\nHi,"Hello')
    with pytest.raises(ValueError, match="expected CSV"):
        read_file(path)


def test_parquet(tmp_path):
    import pyarrow.parquet

    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="expected a Parquet file"):
        read_file(path)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ROW]), path)
    assert read_file(path)[0].choices == ("yes", "no")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet: reading Parquet needs pyarrow: pip install 'cplus\[data\]'"):
        read_file(tmp_path / "rows.parquet")


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
choices = st.builds(
    lambda id, question, options, pick: Choice(
        id=id, question=question, choices=tuple(options), answer=pick % len(options)
    ),
    texts,
    texts,
    st.lists(texts, min_size=1, max_size=5),
    st.integers(0, 99),
)
turns = st.lists(
    st.builds(lambda role, content: Message(role=role, content=content), st.sampled_from(["system", "user"]), texts),
    min_size=1,
    max_size=4,
)
freeforms = st.builds(
    lambda id, messages, response: FreeForm(id=id, messages=tuple(messages), response=response), texts, turns, texts
)


@settings(max_examples=60, deadline=None)
@given(st.one_of(choices, freeforms))
def test_rows_round_trip(example):
    assert from_row(json.loads(json.dumps(to_row(example))), where="here", id="none") == example


# Tasks


def test_task_from_folder_file_and_world(tmp_path, monkeypatch):
    (tmp_path / "medqa.jsonl").write_text(line())
    monkeypatch.setenv("CPLUS_DATA", str(tmp_path))
    task = load_task("medqa")
    assert (task.interface, task.wording, len(task.examples)) == ("letter", "medqa", 1)
    assert load_task("medqa", tmp_path).fingerprint == task.fingerprint
    mine = load_task(str(write(tmp_path, '{"prompt": "a", "response": "b"}')))
    assert (mine.interface, mine.examples[0].response) == ("freeform", "b")
    toy = load_task("harbours")
    assert toy.interface == "cloze"
    assert len({example.id for example in toy.examples}) == len(toy.examples) > 100


def test_requests_for_json_are_built_in_and_right(tmp_path):
    task = load_task("json_requests", tmp_path)  # a folder of data does not hide it
    assert (len(task.examples), task.interface) == (96, "freeform")
    assert len({example.id for example in task.examples}) == 96
    for example in task.examples:
        said = json.loads(example.response)
        request = example.messages[-1].content
        thing = next(key for key in said if key != "name")
        assert request.endswith(f"{said['name']} has {said[thing]} {thing}.")


def test_missing_and_unknown_tasks(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"csqa\.jsonl: task 'csqa' is not there.*data_dir or CPLUS_DATA.*hub"):
        load_task("csqa", tmp_path)
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"the hub: task 'instruct' is not there.*instruct\.jsonl, .*with data_dir"):
        load_task("instruct")
    with pytest.raises(ValueError, match="unknown task 'cqsa'; did you mean csqa"):
        load_task("cqsa")
    with pytest.raises(ValueError, match=r"mine\.jsonl: there is no such file"):
        load_task("./mine.jsonl")


HUB_ROWS = {
    "csqa": {"id": "x", "question": "q", "choices": {"label": ["A", "B"], "text": ["a", "right"]}, "answerKey": "B"},
    "arc_c": {"id": "x", "question": "q", "choices": {"label": ["1", "2"], "text": ["a", "right"]}, "answerKey": "2"},
    "mmlu": {"question": "q", "choices": ["a", "right"], "answer": 1},
    "medqa": {"question": "q", "options": {"A": "a", "B": "right"}, "answer_idx": "B"},
    "hellaswag": {"activity_label": "x", "ctx": "q", "endings": ["a", "right"], "label": "1"},
    "piqa": {"goal": "q", "sol1": "a", "sol2": "right", "label": 1},
    "winogrande": {"sentence": "q", "option1": "a", "option2": "right", "answer": "2"},
    "openbookqa": {
        "id": "x",
        "question_stem": "q",
        "choices": {"label": ["A", "B"], "text": ["a", "right"]},
        "answerKey": "B",
    },
    "boolq": {"passage": "p", "question": "q", "answer": False},
    "social_iqa": {
        "context": "c",
        "question": "q",
        "answerA": "a",
        "answerB": "right",
        "answerC": "c",
        "label": "2",
    },
    "sciq": {"question": "q", "correct_answer": "right", "distractor1": "a", "distractor2": "b", "distractor3": "c"},
    "truthfulqa": {"question": "q", "mc1_targets": {"choices": ["right", "a", "b"], "labels": [1, 0, 0]}},
    "copa": {"premise": "p", "question": "cause", "choice1": "a", "choice2": "right", "label": 1},
    "gsm8k": {"question": "q", "answer": "right"},
}


@pytest.mark.parametrize("name", HUB_ROWS)
def test_hub_rows_in_our_schema(name, monkeypatch):
    calls = []

    def load_dataset(path, config, split):
        calls.append((path, config, split))
        return [HUB_ROWS[name]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    (example,) = load_task(name).examples
    said = example.response if isinstance(example, FreeForm) else example.right
    assert said == ("no" if name == "boolq" else "right")
    place = readers.BENCHMARKS[name]
    assert calls == [(place.path, place.config, place.split)]


def test_hub_set_in_our_schema_by_name(monkeypatch):
    fake = types.SimpleNamespace(load_dataset=lambda path, config, split: {"train": [ROW], "test": [ROW]})
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(ValueError, match=r"has the splits train, test; choose one, e\.g\. some/set@train"):
        load_task("some/set")
    fake.load_dataset = lambda path, config, split: [{"label": "a"}]
    with pytest.raises(ValueError, match=r"some/set: row 1: expected the keys"):
        load_task("some/set@test")
    fake.load_dataset = lambda path, config, split: {"train": [ROW]}
    assert [example.id for example in load_task("some/set").examples] == ["q1"]


def test_a_hub_row_that_changed_its_form_is_named(monkeypatch):
    changed = [HUB_ROWS["piqa"], {"goal": "q", "sol1": "a", "solution2": "b", "label": 1}]
    fake = types.SimpleNamespace(load_dataset=lambda path, config, split: changed)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"row 2: not in the known form .*'sol2'.*; it has the keys goal, label, sol1"):
        load_task("piqa")


def test_folder_of_a_datasets_set_and_a_hub_out_of_reach(tmp_path, monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, split))
        if path != str(tmp_path):
            raise ConnectionError("no network")
        return [ROW]

    errors = types.SimpleNamespace(DatasetsError=RuntimeError)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, exceptions=errors))
    assert load_task(f"{tmp_path}@test").examples[0].id == "q1"
    assert asked == [(str(tmp_path), "test")]
    with pytest.raises(ValueError, match="could not read the data set 'some/set': no network; check"):
        load_task("some/set@test")


def test_a_folder_with_a_damaged_file_is_one_sentence(tmp_path):
    (tmp_path / "rows.json").write_text('{"question": ')
    with pytest.raises(ValueError, match=r"could not read the data set .*: JSON parse error.*; check its name"):
        load_task(str(tmp_path))


def test_hub_without_datasets(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delenv("CPLUS_DATA", raising=False)
    with pytest.raises(ValueError, match=r"needs the datasets package: pip install 'cplus\[data\]'"):
        load_task("csqa")


@pytest.mark.real
def test_every_named_set_reads(data_dir):
    sizes = {name: len(load_task(name, data_dir).examples) for name in TASKS}
    assert (sizes["csqa"], sizes["arc_c"], sizes["mmlu"], sizes["medqa"]) == (1096, 1266, 1553, 1272)
    assert sum(sizes[name] for name in EXTERNAL) == 9880
    assert sizes["instruct_short"] == 300
    assert set(TASKS) == set(PAPER) | set(EXTERNAL) | set(TRAINING) | set(FREEFORM)


# Split and anchors

EXAMPLES = [Choice(id=f"q{i}", question=f"Question {i}?", choices=("a", "b"), answer=i % 2) for i in range(40)]
MODEL = "f" * 64


def always_a(examples=EXAMPLES, model=MODEL):
    return split(
        examples,
        [predicted(example, 0) for example in examples],
        model_fingerprint=model,
        interface="letter",
        stack=stack(),
    )


def test_split_parts_by_the_predictions():
    made = always_a()
    assert [example.id for example in made.past] == [f"q{i}" for i in range(0, 40, 2)]
    assert {example.answer for example in made.new} == {1}
    with pytest.raises(ValueError, match="one prediction for each of 40 examples, got 39"):
        split(EXAMPLES, made.predictions[:-1], model_fingerprint=MODEL, interface="letter", stack=stack())


def test_split_is_stored_and_never_mixed(tmp_path):
    made = always_a()
    path = tmp_path / "split.json"
    save_split(made, path)
    assert load_split(path, EXAMPLES, model_fingerprint=MODEL) == made
    with pytest.raises(ValueError, match=r"split of another model \(ffffffffffff, expected 0000"):
        load_split(path, EXAMPLES, model_fingerprint="0" * 64)
    with pytest.raises(ValueError, match="split of another data"):
        load_split(path, EXAMPLES[::-1], model_fingerprint=MODEL)
    path.write_text('{"model_fingerprint": 1}')
    with pytest.raises(ValueError, match="expected a stored split"):
        load_split(path, EXAMPLES, model_fingerprint=MODEL)


def test_cached_split_predicts_once_for_each_model_interface_and_stack(tmp_path):
    asked = []

    def predict():
        asked.append(1)
        return [predicted(example, 0) for example in EXAMPLES]

    def cached(model=MODEL, interface="letter", **where):
        return cached_split(
            tmp_path, EXAMPLES, predict, model_fingerprint=model, interface=interface, stack=stack(**where)
        )

    assert cached() == cached()
    assert len(asked) == 1
    cached(model="0" * 64)
    cached(interface="cloze")
    cached(compute_dtype="bfloat16")
    assert len(asked) == 4
    cached()
    assert len(asked) == 4


def test_anchors_are_nested_and_seeded():
    made = always_a()
    budgets = [draw_anchors(made, size, seed=3) for size in (4, 8, 16)]
    assert budgets[2][:8] == budgets[1]
    assert budgets[1][:4] == budgets[0]
    assert set(budgets[2]) <= set(made.past)
    assert len(set(draw_anchors(made, 20, seed=3))) == 20
    assert draw_anchors(made, 16, seed=4) != budgets[2]
    with pytest.raises(ValueError, match="asked for 21 initially correct examples as anchors, but there are 20; draw"):
        draw_anchors(made, 21, seed=3)


def test_mixtures_share_their_prefixes():
    made = always_a()
    assert draw_mixture(made, correct=8, wrong=0, seed=1) == draw_anchors(made, 8, seed=1)
    six = draw_mixture(made, correct=6, wrong=2, seed=1)
    assert six[:6] == draw_anchors(made, 8, seed=1)[:6]
    assert draw_mixture(made, correct=0, wrong=8, seed=1)[:2] == six[6:]
    assert set(six[6:]) <= set(made.new)
    with pytest.raises(ValueError, match="asked for 21 initially wrong"):
        draw_mixture(made, correct=0, wrong=21, seed=1)


def test_the_command_stores_a_split(tiny_llama, tmp_path):
    models.save(tiny_llama.model, tiny_llama.tokenizer, tmp_path / "m")
    long = {**ROW, "id": "long", "question": "why " * 600}
    rows = write(
        tmp_path, *(line(id=f"q{i}", question=f"Is it {i}?", answer=i % 2) for i in range(12)), json.dumps(long)
    )
    arguments = ["evaluate", str(tmp_path / "m"), "--task", str(rows), "--split", str(tmp_path / "split.json")]
    refused = CliRunner().invoke(app, arguments)
    assert "1 of 13 rows are longer than the limit of 512" in str(refused.exception)
    assert not (tmp_path / "split.json").exists()
    done = CliRunner().invoke(app, [*arguments, "--set", "too_long=exclude", "--json"])
    [found] = json.loads(done.stdout)["tasks"]
    report = found["split"]
    assert (report["past"] + report["new"], found["excluded"], found["interface"]) == (12, 1, "letter")
    stored = load_split(
        tmp_path / "split.json", read_file(rows)[:-1], model_fingerprint=models.load(tmp_path / "m").fingerprint
    )
    assert len(stored.past) == report["past"] == sum(p.right for p in stored.predictions)
    assert stored.stack["compute_dtype"] == "float32"


# Tokens and the window


def test_rows_that_teach_nothing_are_refused():
    with pytest.raises(ValueError, match="at least one prompt token and one target token, got 0 and 1"):
        Encoded((), (1,))
    with pytest.raises(ValueError, match="at least one prompt token and one target token, got 2 and 0"):
        Encoded((1, 2), ())
    for scored in ((True,), (False, False)):
        with pytest.raises(ValueError, match="expected to score some of 2 target tokens, got"):
            Encoded((1,), (2, 3), scored)
    assert Encoded((1,), (2, 3)).labels == (2, 3)
    assert Encoded((1,), (2, 3), (False, True)).labels == (-100, 3)


def test_rows_longer_than_the_window_are_counted():
    rows = [Encoded((1,) * 5, (2,)), Encoded((1,) * 9, (2,)), Encoded((1,) * 4, (2, 2))]
    assert fit(rows, window=9).excluded == ()
    assert fit(rows, window=5, policy="exclude").kept == (0, 2)
    with pytest.raises(ValueError, match=r"1 of 3 rows .* limit of 5 tokens \(the longest has 9; the first is row 2\)"):
        fit(rows, window=5)
