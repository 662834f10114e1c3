"""The formats people have, from every kind of file: recognised, reported in one line, and refused by row if wrong."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplus.data.examples import Choice, Example, FreeForm, Message, lines, to_row
from cplus.data.formats import FORMATS, from_row
from cplus.data.readers import Found, collect, parse_columns, read_file, read_rows, renamed
from cplus.data.tasks import load_task

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
ROW = {"id": "q1", "question": "Is ice cold?", "choices": ["yes", "no"], "answer": 0}
ALPACA = {"instruction": "Translate.", "input": "cheese", "output": "Käse"}
SHARE = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}


def found(*rows: Any, requests: bool = False, columns: Mapping[str, str] | None = None) -> Found:
    numbered = [(f"row {number}", row) for number, row in enumerate(rows, start=1)]
    return collect(renamed(numbered, columns), name="row", source="rows", requests=requests)


def one(row: Mapping[str, Any], **options: Any) -> FreeForm:
    (example,) = found(row, **options).examples
    assert isinstance(example, FreeForm)
    return example


def said(example: Example) -> list[tuple[str, str]]:
    assert isinstance(example, FreeForm)
    return [(turn.role, turn.content) for turn in example.turns]


def turns(*roles: str, **last: Any) -> list[dict[str, Any]]:
    """Turns that each say their role; `last` is added to the last one."""
    made: list[dict[str, Any]] = [{"role": role, "content": role} for role in roles]
    return [*made[:-1], {**made[-1], **last}]


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": "{}", **changes}}


def calling(call: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], **more}


TOLD = [("user", "user"), ("assistant", "assistant")]


# Rows


def test_every_row_of_the_page_is_read() -> None:
    learned, asked = PAGE.split("## Rows without a response")
    rows = [json.loads(row) for row in re.findall(r"^\|[^|]*\| `(\{.*?\})` \|", learned, re.M)]
    names = {found(row).detected.partition(" ")[0] for row in rows}
    assert names == {one.name for one in FORMATS}
    assert all(isinstance(e, Choice) or e.answered for row in rows for e in found(row).examples)
    alone = [json.loads(row) for row in re.findall(r"^\|[^|]*\| `(\{.*?\})` \|", asked, re.M)]
    assert len(alone) == 4
    for row in alone:
        assert "1 without a response" in found(row, requests=True).detected
        assert one(row, requests=True).turns[-1].content == "Name three birds."
        with pytest.raises(ValueError, match="row 1: expected"):
            found(row)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**ALPACA, "input": ""}, [("user", "Translate."), ("assistant", "Käse")]),
        ({**ALPACA, "system": "Hm"}, [("system", "Hm"), ("user", "Translate.\n\ncheese"), ("assistant", "Käse")]),
        ({**SHARE, "system": "Hm", "tools": ""}, [("system", "Hm"), ("user", "Hi"), ("assistant", "Hello.")]),
        ({"prompt": "a", "completion": " b"}, [("user", "a"), ("assistant", " b")]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [("user", "a"), ("assistant", "b")]),
        ({"prompt": turns("user"), "chosen": turns("assistant"), "rejected": []}, TOLD),
        ({"prompt": "user", "chosen": turns("user", "assistant"), "rejected": []}, TOLD),
        ({"text": "Fish swim."}, [("assistant", "Fish swim.")]),
    ],
)
def test_rows_become_conversations(row: Mapping[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(one(row)) == expected


def test_only_completions_and_chosen_ends_are_learned_and_calls_of_sharegpt_read() -> None:
    example = one({"prompt": turns("user", "assistant", "user"), "completion": turns("assistant", "user", "assistant")})
    assert [turn.trained for turn in example.turns if turn.role == "assistant"] == [False, True, True]
    example = one({"chosen": turns("user", "assistant", "user", "assistant"), "rejected": turns("user", "assistant")})
    assert [turn.trained for turn in example.turns if turn.role == "assistant"] == [False, True]
    talk = [
        {"from": "human", "value": "1?"},
        {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": 1}})},
        {"from": "observation", "value": "1"},
        {"from": "gpt", "value": "It is 1."},
    ]
    example = one({"conversations": talk, "tools": json.dumps([{"name": "add", "parameters": {}}])})
    assert [turn.role for turn in example.turns] == ["user", "assistant", "tool", "assistant"]
    (made,) = json.loads(example.messages[1].calls)
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
    assert json.loads(example.tools)[0]["name"] == "add"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, [1]], "row 2: expected a JSON object, got list"),
        ([{**ROW, "answer": 2}], "row 1: expected answer to be an index from 0 to 1, got 2"),
        ([{**ROW, "answer": True}], "index from 0 to 1, got True"),
        ([{**ROW, "choices": []}], "expected a list of choices"),
        ([{**ROW, "choices": ["yes"]}], "at least two choices"),
        ([{**ROW, "choices": ["yes", " "]}], "choice 1: expected a non-empty string"),
        ([{**ROW, "question": "\ud800"}], "half of a surrogate pair"),
        ([{**ROW, "id": None}], "expected id to be"),
        ([ROW, ROW], r"row 2: the id 'q1' was given before, at row 1"),
        ([ALPACA, {**ALPACA, "output": ""}], "row 2: output: expected a non-empty string, got ''"),
        ([{**ALPACA, "instruction": " "}], "row 1: instruction: expected a non-empty string"),
        ([{**ALPACA, "input": 3}], "row 1: input: expected a non-empty string, got 3"),
        ([ALPACA, SHARE], "row 2: expected one format in a file, but this row is sharegpt and the first is alpaca"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}], "row 2: expected one format"),
        ([{**ALPACA, "history": [["a", "b"]]}], "row 1: alpaca rows are read without 'history', and this row has it"),
        ([{"text": "a", "label": 1}], "text rows are read without 'label'"),
        ([{"words": "a"}], "row 1: expected the keys question, choices, answer; or prompt, .* found words; map others"),
        ([{"text": ""}], "row 1: text: expected a non-empty string"),
        ([{"conversations": []}], "row 1: expected a list of turns"),
        ([{"conversations": SHARE["conversations"][1:]}], "answer to another, got 1 turns that end with one of assist"),
        ([{"conversations": [*SHARE["conversations"], {"from": "human", "value": "a"}]}], "end with one of user"),
        ([{"conversations": [{"from": "user", "value": "a"}]}], "row 1: turn 0: expected from to be human, gpt"),
        (
            [{"conversations": [SHARE["conversations"][0], {"from": "function_call", "value": "add(1)"}]}],
            "row 1: turn 1: function_call: expected JSON",
        ),
        ([{"conversations": [{"from": "function_call", "value": "[]"}]}], "turn 0: expected a non-empty string"),
        ([{"prompt": "a", "completion": ""}], "row 1: completion: expected a non-empty string"),
        ([{"chosen": "a", "rejected": "b"}], "row 1: prompt: expected a non-empty string, got None"),
        ([calling(function(arguments="a=1"))], "row 1: turn 1: tool call 0: arguments: expected JSON"),
        ([calling(function(arguments='{"a": NaN}'))], "expected JSON values"),
        ([calling(function(arguments="[1]"))], r"expected arguments to be a JSON object, got '\[1\]'"),
        ([calling(function(arguments={"a": "\ud800"}))], "half of a surrogate pair"),
        ([calling(function(name=""))], "row 1: turn 1: tool call 0: name: expected a non-empty string"),
        ([calling({"name": "add"})], 'tool call 0: expected {"type": "function"'),
        ([calling(function(), tools="add")], "row 1: tools: expected JSON"),
        ([calling(function(), tools={"a": 1})], "row 1: expected tools to be a list of schemas"),
        ([calling(function(), tools=[{"function": {}}])], "row 1: tool 0: name: expected a non-empty string"),
        ([{"messages": turns("user", "assistant", function_call={})}], "function_call is not read; write it as tool_c"),
        ([{"messages": turns("user", "assistant", weight=0)}], "row 1: the last turn has a weight of 0"),
        ([{"messages": turns("user", "assistant", weight=2)}], "expected a weight of 0 or 1, got 2"),
        ([{"messages": turns("developer", "assistant")}], "turn 0: expected a role of system, user, assistant, tool"),
        ([{"messages": turns("user", "assistant", content="")}], "turn 1: expected a non-empty string"),
    ],
)
def test_wrong_rows_are_named(rows: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(*rows)


def test_empty_fields_are_no_requests() -> None:
    for row, message in (
        ({"prompt": "a", "response": ""}, "response: expected a non-empty string"),
        ({"prompt": ""}, "prompt: expected a non-empty string"),
        ({"messages": turns("system")}, "end with one of system"),
        ({"messages": []}, "expected a list of turns"),
    ):
        with pytest.raises(ValueError, match=f"row 1: .*{message}"):
            found(row, requests=True)


def test_the_line_that_reports_a_format() -> None:
    rows = [{**ALPACA, "source": "web", "id": f"a{i}"} for i in range(40)]
    assert found(*rows).detected == "alpaca rows: instruction, input, output; 40 read; not used: source"
    mixed = found({"prompt": "a", "response": "b"}, {"messages": turns("user")}, requests=True)
    assert mixed.detected == (
        "prompt-response and messages rows: prompt, response, messages; 2 read; 1 without a response"
    )
    assert found({"text": "a b"}).detected.startswith("text rows: text; 1 read; plain text without a chat")
    several = {"prompt": "a", "response": "b", "text": "c", "chosen": "d", "rejected": "e", "label": 1}
    assert found(several).detected.startswith("prompt-response rows: prompt, response; 1 read; not used: text, cho")


def test_requests_alone_read_back_and_stay_refused_without_leave(tmp_path: Path) -> None:
    asked = Message(role="user", content="Name a bird.")
    rows: list[Example] = [
        FreeForm(id="a", messages=(asked,), response=""),
        FreeForm(id="b", messages=(Message(role="system", content="Be brief."), asked), response=""),
        FreeForm(id="c", messages=(asked,), response="Hello."),
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text(lines(rows))
    assert list(read_rows(path, requests=True).examples) == rows
    assert load_task(str(path), requests=True).examples == tuple(rows)
    with pytest.raises(ValueError, match=r"asked\.jsonl:1: expected the keys"):
        read_file(path)


def test_columns_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("question,answer\n2 + 2?,four\n")
    columns = parse_columns("prompt=question, response=answer")
    (example,) = load_task(str(path), columns=columns).examples
    assert said(example) == [("user", "2 + 2?"), ("assistant", "four")]
    with pytest.raises(ValueError, match=r"faq\.csv:2: expected the column 'q' for prompt, found answer, question"):
        read_rows(path, columns={"prompt": "q"})
    with pytest.raises(ValueError, match=r"expected columns to name some of id, question, .*, got promt"):
        read_rows(path, columns={"promt": "question"})
    with pytest.raises(ValueError, match="columns are mapped for a file"):
        load_task("harbours", columns=columns)
    swapped = one({"prompt": "a", "response": "b"}, columns={"prompt": "response", "response": "prompt"})
    assert said(swapped) == [("user", "b"), ("assistant", "a")]
    for wrong in ("prompt", "prompt=", "=a", "prompt=a,prompt=b", ""):
        with pytest.raises(ValueError, match="expected columns as prompt=question,response=answer"):
            parse_columns(wrong)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
TURNS = st.builds(lambda role, content: Message(role=role, content=content), st.sampled_from(["system", "user"]), TEXTS)


@settings(max_examples=40, deadline=None)
@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=5), st.lists(TURNS, min_size=1, max_size=4), st.integers(0, 99))
def test_rows_round_trip(id: str, texts: list[str], messages: list[Message], pick: int) -> None:
    choice = Choice(id=id, question=texts[0], choices=tuple(texts), answer=pick % len(texts))
    for example in (choice, FreeForm(id=id, messages=tuple(messages), response=texts[-1])):
        assert from_row(json.loads(json.dumps(to_row(example))), where="here", id="none") == example


# Files


def _table(rows: list[dict[str, str]], delimiter: str) -> str:
    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    rows = [ALPACA, {**ALPACA, "input": "bread\tand\nbutter", "output": "Br\u2028ot"}]
    expected = [said(example) for example in found(*rows).examples]
    texts = {
        "jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n\n" for row in rows),
        "json": json.dumps(rows),
        "csv": "\ufeff" + _table(rows, ","),
        "tsv": _table(rows, "\t"),
    }
    for kind, text in texts.items():
        (tmp_path / f"rows.{kind}").write_text(text, encoding="utf-8", newline="")
        (tmp_path / f"rows.{kind}.gz").write_bytes(gzip.compress(text.encode()))
        for name in (f"rows.{kind}", f"rows.{kind}.gz"):
            task = load_task(str(tmp_path / name))
            assert [said(example) for example in task.examples] == expected, name
            assert (task.examples[0].id, task.detected) == ("rows-0001", found(*rows).detected)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{}\n{broken", r"a\.jsonl:1: expected the keys"),
        ("a.jsonl", json.dumps(ROW) + "\n\n{broken", r"a\.jsonl:3: expected JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: expected JSON"),
        ("a.jsonl", "\n  \n", "expected at least one example, but it is empty"),
        ("a.jsonl", b'\n{"prompt": "\xff"}', r"a\.jsonl:2: expected UTF-8 text, got the byte 0xff"),
        ("a.jsonl", '{"text": "p", "text": "q"}', r"expected each name once, got 'text' 2 times"),
        ("a.json", '[{"messages": [{"role": "user", "role": "user"}]}]', "each name once, got 'role' 2 times"),
        ("a.csv", "prompt,response,prompt\np,r,q\n", r"a\.csv:1: expected each name once, got 'prompt' 2 times"),
        ("a.csv", "prompt,response\nHi,Hello\nHi\n", r"a\.csv:3: expected 2 cells"),
        ("a.csv", 'question,choices,answer\nq,"yes, no",1\n', r"a\.csv:2: choices: expected JSON"),
        ("a.tsv", 'prompt\tresponse\na\t"b', r"a\.tsv:1: expected a table, but it does not parse"),
        ("a.parquet", b"PAR1", "expected a Parquet file"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: expected a gzip file, but it does not unpack"),
        ("a.jsonl.gz", gzip.compress(b"{}", mtime=0)[:-6], "expected a gzip file, but it does not unpack"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00" + bytes(20), "expected a gzip file, but it does not unpack"),
        ("a.parquet.gz", b"", r"a\.parquet\.gz: expected a file ending in \.jsonl.*\.gz, got"),
        ("a.xml", b"", r"a\.xml: expected a file ending in \.jsonl"),
        ("a.csv", None, "no such file"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, content: str | bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        read_file(tmp_path / name)


def test_a_packed_file_that_is_no_text_is_not_unpacked_to_its_end(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as packed:
        packed.write(bytes(2**27))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz: expected text, which unpacks to less than 67,108,864 bytes"):
        read_file(tmp_path / "a.jsonl.gz")


def test_lists_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(_table([{"conversations": json.dumps(SHARE["conversations"]), "system": ""}], "\t"))
    assert said(read_file(tmp_path / "a.tsv")[0]) == [("user", "Hi"), ("assistant", "Hello.")]
    (tmp_path / "a.csv").write_text(_table([{**ROW, "choices": '["yes", "no"]', "answer": "1"}], ","))  # type: ignore[dict-item]
    assert read_file(tmp_path / "a.csv") == [
        Choice(id="q1", question="Is ice cold?", choices=("yes", "no"), answer=1),
    ]


def test_parquet_and_saved_folders_with_absent_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = {"role": "user", "content": "1?"}
    called = {"role": "assistant", "content": None, "tool_calls": [function(arguments='{"a": 1}')]}
    told = {"role": "tool", "content": "1", "tool_call_id": "c"}
    talk = [{"messages": turns("user", "assistant")}, {"messages": [asked, called, told, *turns("assistant")]}]
    whole = datasets.Dataset.from_list(talk)
    whole.to_parquet(tmp_path / "rows.parquet")
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(tmp_path / "parts")
    for name in ("rows.parquet", "saved", "parts@train"):
        task = load_task(str(tmp_path / name))
        assert [said(example) for example in task.examples] == [said(example) for example in found(*talk).examples]
        assert task.detected == "messages rows: messages; 2 read"
        calls = task.examples[1]
        assert isinstance(calls, FreeForm)
        assert json.loads(calls.messages[1].calls)[0]["function"]["name"] == "add"
    assert len(load_task(str(tmp_path / "parts@test")).examples) == 1
    for name in ("parts", "parts@dev"):
        with pytest.raises(ValueError, match="has the splits train, test; choose one"):
            load_task(str(tmp_path / name))
    with pytest.raises(ValueError, match="was saved without splits; leave @train out"):
        load_task(str(tmp_path / "saved@train"))
    (tmp_path / "saved" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"could not read the data set '.*saved'"):
        load_task(str(tmp_path / "saved"))
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"rows\.parquet: reading Parquet needs pyarrow: pip install 'cplus\[data\]'"):
        read_file(tmp_path / "rows.parquet")
