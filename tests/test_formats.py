"""The formats people have: each is recognised, reported in one line, and refused by row where it is wrong."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplus.data.examples import Choice, Example, FreeForm, Message, from_row, lines, to_row
from cplus.data.formats import FIELDS, FORMATS, OWN, Detected
from cplus.data.readers import Found, collect, parse_columns, read_file, read_rows, renamed
from cplus.data.tasks import load_task

PAGE = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8")
ALPACA = {"instruction": "Translate.", "input": "cheese", "output": "Käse"}
SHARE = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]}


def found(*rows: Mapping[str, Any], requests: bool = False, columns: Mapping[str, str] | None = None) -> Found:
    numbered = [(f"row {number}", row) for number, row in enumerate(rows, start=1)]
    return collect(renamed(numbered, columns), name="row", source="rows", requests=requests)


def one(row: Mapping[str, Any], **options: Any) -> FreeForm:
    (example,) = found(row, **options).examples
    assert isinstance(example, FreeForm)
    return example


def said(example: FreeForm) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in example.turns]


def test_every_row_of_the_page_is_read() -> None:
    learned, asked = PAGE.split("## Rows without a response")
    rows = [json.loads(row) for row in re.findall(r"^\|[^|]*\| `(\{.*?\})` \|", learned, re.M)]
    assert len(rows) == 11
    names = [found(row).detected.format for row in rows]
    assert set(names) == {one.name for one in FORMATS if not one.request}
    assert all(isinstance(e, Choice) or e.answered for row in rows for e in found(row).examples)
    alone = [json.loads(row) for row in re.findall(r"^\|[^|]*\| `(\{.*?\})` \|", asked, re.M)]
    assert [found(row, requests=True).detected.requests for row in alone] == [1] * 4
    assert all(one(row, requests=True).turns[-1].content == "Name three birds." for row in alone)
    for row in alone:
        with pytest.raises(ValueError, match="row 1: expected"):
            found(row)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ALPACA, [("user", "Translate.\n\ncheese"), ("assistant", "Käse")]),
        ({**ALPACA, "input": ""}, [("user", "Translate."), ("assistant", "Käse")]),
        ({"instruction": "Go.", "output": "Gone."}, [("user", "Go."), ("assistant", "Gone.")]),
        (
            {**ALPACA, "input": None, "system": "Be brief."},
            [("system", "Be brief."), ("user", "Translate."), ("assistant", "Käse")],
        ),
        (SHARE, [("user", "Hi"), ("assistant", "Hello.")]),
        (
            {**SHARE, "system": "Be brief.", "tools": ""},
            [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello.")],
        ),
        ({"prompt": "a", "completion": " b"}, [("user", "a"), ("assistant", " b")]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, [("user", "a"), ("assistant", "b")]),
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": [{"role": "assistant", "content": "b"}],
                "rejected": [],
            },
            [("user", "a"), ("assistant", "b")],
        ),
        (
            {
                "prompt": "a",
                "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "rejected": [],
            },
            [("user", "a"), ("assistant", "b")],
        ),
        ({"text": "Fish swim."}, [("assistant", "Fish swim.")]),
    ],
)
def test_rows_become_conversations(row: Mapping[str, Any], expected: list[tuple[str, str]]) -> None:
    assert said(one(row)) == expected


def test_only_completions_and_chosen_ends_are_learned() -> None:
    example = one({"prompt": turns("user", "assistant", "user"), "completion": turns("assistant", "user", "assistant")})
    assert [turn.trained for turn in example.turns if turn.role == "assistant"] == [False, True, True]
    example = one({"chosen": turns("user", "assistant", "user", "assistant"), "rejected": turns("user", "assistant")})
    assert [turn.trained for turn in example.turns if turn.role == "assistant"] == [False, True]
    assert "the chosen answers are learned" in found({"prompt": "a", "chosen": "b", "rejected": "c"}).detected.sentence


def turns(*roles: str, **last: Any) -> list[dict[str, Any]]:
    """Turns that each say their role; `last` is added to the last one."""
    made: list[dict[str, Any]] = [{"role": role, "content": role} for role in roles]
    return [*made[:-1], {**made[-1], **last}]


def test_calls_and_results_of_sharegpt() -> None:
    call = json.dumps({"name": "add", "arguments": {"a": 1}})
    example = one(
        {
            "conversations": [
                {"from": "human", "value": "1?"},
                {"from": "function_call", "value": call},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "It is 1."},
            ],
            "tools": json.dumps([{"name": "add", "parameters": {}}]),
        }
    )
    assert [turn.role for turn in example.turns] == ["user", "assistant", "tool", "assistant"]
    (made,) = json.loads(example.messages[1].calls)
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 1})
    assert json.loads(example.tools)[0]["name"] == "add"


def calling(call: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}], **more}


def function(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": "{}", **changes}}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ALPACA, {**ALPACA, "output": ""}], "row 2: output: expected a non-empty string, got ''"),
        ([{**ALPACA, "instruction": " "}], "row 1: instruction: expected a non-empty string"),
        ([{**ALPACA, "input": 3}], "row 1: input: expected a non-empty string, got 3"),
        ([ALPACA, SHARE], "row 2: expected one format in a file, but this row is sharegpt and the first is alpaca"),
        ([ALPACA, {"text": "a"}], "row 2: expected one format .* is text and the first is alpaca; put them in two"),
        ([{"prompt": "a", "response": "b"}, {"prompt": "a", "completion": "b"}], "row 2: expected one format"),
        ([{**ALPACA, **SHARE}], "row 1: this row has the keys of alpaca and of sharegpt; remove"),
        ([{**ALPACA, "history": [["a", "b"]]}], "row 1: alpaca rows are read without 'history', and this row has it"),
        ([{"prompt": "a", "completion": "b", "label": False}], "read without 'label'"),
        ([{"words": "a"}], "row 1: expected the keys question, choices, answer; or prompt, .* found words; map others"),
        ([{"text": "a", "label": 1}], "found label, text"),
        ([{"text": ""}], "row 1: text: expected a non-empty string"),
        ([{"conversations": []}], "row 1: expected conversations to be a list of turns"),
        ([{"conversations": SHARE["conversations"][:1]}], "row 1: expected conversations of at least two turns"),
        ([{"conversations": [*SHARE["conversations"], {"from": "human", "value": "a"}]}], "got a turn of user"),
        ([{"conversations": [{"from": "user", "value": "a"}]}], "row 1: turn 0: expected from to be human, gpt"),
        ([{"conversations": [{"from": "human", "value": ""}]}], "row 1: turn 0: expected a non-empty string"),
        (
            [{"conversations": [{"from": "system", "value": "a"}, *SHARE["conversations"]], "system": "b"}],
            "the system message is given twice",
        ),
        (
            [{"conversations": [SHARE["conversations"][0], {"from": "function_call", "value": "add(1)"}]}],
            "row 1: turn 1: function_call: expected JSON",
        ),
        ([{"conversations": [{"from": "function_call", "value": "[]"}]}], "turn 0: expected a function_call of"),
        ([{"prompt": "a", "completion": ""}], "row 1: completion: expected a non-empty string"),
        ([{"prompt": "a", "completion": turns("user")}], "expected the last turn to be the assistant"),
        ([{"chosen": "a", "rejected": "b"}], "row 1: expected a prompt beside chosen"),
        (
            [{"prompt": "x", "chosen": turns("user", "assistant"), "rejected": 0}],
            "expected chosen to hold the answer alone, got 'user' beside a prompt",
        ),
        ([calling(function(arguments="a=1"))], "row 1: turn 1: tool call 0: arguments: expected JSON"),
        ([calling(function(arguments='{"a": NaN}'))], "NaN is no JSON"),
        ([calling(function(arguments=""))], "arguments: expected JSON"),
        ([calling(function(arguments="[1]"))], r"expected arguments to be a JSON object, got '\[1\]'; write \{\}"),
        ([calling(function(arguments=None))], "expected arguments to be a JSON object, got None"),
        ([calling(function(arguments={"a": "\ud800"}))], "half of a surrogate pair"),
        ([calling(function(arguments={"a": {1}}))], "expected JSON values"),
        ([calling(function(name=""))], "row 1: turn 1: tool call 0: name: expected a non-empty string"),
        ([calling({"name": "add"})], 'tool call 0: expected {"type": "function"'),
        ([calling(function(), tools="add")], "row 1: tools: expected JSON"),
        ([calling(function(), tools={"a": 1})], "row 1: expected tools to be a list of schemas"),
        ([calling(function(), tools=[{"function": {}}])], "row 1: tool 0: name: expected a non-empty string"),
        ([{"messages": turns("user", "assistant", function_call={})}], "function_call is not read; write it as tool_c"),
        ([{"messages": turns("user", "assistant", weight=0)}], "row 1: the last turn has a weight of 0"),
        ([{"messages": turns("user", "assistant", weight=2)}], "expected a weight of 0 or 1, got 2"),
        ([{"messages": turns("developer", "assistant")}], "turn 0: expected a role of system, user, assistant or tool"),
        ([{"messages": turns("user", "assistant", content="")}], "turn 1: expected a non-empty string"),
    ],
)
def test_wrong_rows_are_named(rows: list[Mapping[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(*rows)


def test_the_line_that_reports_a_format() -> None:
    rows = [{**ALPACA, "source": "web", "id": f"a{i}"} for i in range(40)]
    detected = found(*rows).detected
    assert detected == Detected(format="alpaca", keys=("instruction", "input", "output"), rows=40, unused=("source",))
    assert str(detected) == "alpaca rows: instruction, input, output; 40 read; not used: source"
    mixed = found({"prompt": "a", "response": "b"}, {"messages": [{"role": "user", "content": "c"}]}, requests=True)
    assert mixed.detected.sentence == (
        "prompt-response and messages rows: prompt, response, messages; 2 read; 1 without a response"
    )
    assert found({"text": "a b"}).detected.sentence.startswith("text rows: text; 1 read; plain text without a chat")


def test_own_formats_come_first_as_ever() -> None:
    row = {"prompt": "a", "response": "b", "text": "c", "chosen": "d", "rejected": "e", "label": 1}
    assert found(row).detected.format == "prompt-response"
    assert [own.name for own in OWN] == ["choice", "prompt-response", "messages"]
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "prompt": "a"}
    assert found(talk).detected.format == "messages"


def test_columns_are_mapped(tmp_path: Path) -> None:
    path = tmp_path / "faq.csv"
    path.write_text("question,answer\n2 + 2?,four\n")
    columns = parse_columns("prompt=question, response=answer")
    (example,) = read_rows(path, columns=columns).examples
    assert said(example) == [("user", "2 + 2?"), ("assistant", "four")]  # type: ignore[arg-type]
    (again,) = load_task(str(tmp_path / "faq.csv"), columns=columns).examples
    assert again == example
    with pytest.raises(ValueError, match=r"faq\.csv:2: expected the column 'q' for prompt, found answer, question"):
        read_rows(tmp_path / "faq.csv", columns={"prompt": "q"})
    with pytest.raises(ValueError, match=r"expected columns to name some of id, question, .*, got promt"):
        read_rows(tmp_path / "faq.csv", columns={"promt": "question"})
    with pytest.raises(ValueError, match="columns are mapped for a file"):
        load_task("harbours", columns=columns)
    swapped = one({"prompt": "a", "response": "b"}, columns={"prompt": "response", "response": "prompt"})
    assert said(swapped) == [("user", "b"), ("assistant", "a")]
    for wrong in ("prompt", "prompt=", "=a", "prompt=a,prompt=b", ""):
        with pytest.raises(ValueError, match="expected columns as prompt=question,response=answer"):
            parse_columns(wrong)


# Files


def test_the_same_rows_from_every_kind_of_file(tmp_path: Path) -> None:
    rows = [ALPACA, {**ALPACA, "input": "bread\tand\nbutter", "output": "Brot"}]
    expected = [(e.messages, e.response) for e in found(*rows).examples if isinstance(e, FreeForm)]
    texts = {
        "jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "json": json.dumps(rows),
        "csv": _table(rows, ","),
        "tsv": _table(rows, "\t"),
    }
    for kind, text in texts.items():
        (tmp_path / f"rows.{kind}").write_text(text, encoding="utf-8", newline="")
        (tmp_path / f"rows.{kind}.gz").write_bytes(gzip.compress(text.encode()))
        for name in (f"rows.{kind}", f"rows.{kind}.gz"):
            read = read_file(tmp_path / name)
            assert [(e.messages, e.response) for e in read if isinstance(e, FreeForm)] == expected, name
            assert read[0].id == "rows-0001"
            assert load_task(str(tmp_path / name)).detected == found(*rows).detected


def _table(rows: list[dict[str, str]], delimiter: str) -> str:
    import csv
    import io

    table = io.StringIO()
    writer = csv.DictWriter(table, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


def test_conversations_in_a_table(tmp_path: Path) -> None:
    row = {"conversations": json.dumps(SHARE["conversations"]), "system": ""}
    (tmp_path / "rows.tsv").write_text(_table([row], "\t"))
    assert said(read_file(tmp_path / "rows.tsv")[0]) == [("user", "Hi"), ("assistant", "Hello.")]  # type: ignore[arg-type]
    (tmp_path / "rows.tsv").write_text('prompt\tresponse\na\t"b')
    with pytest.raises(ValueError, match=r"rows\.tsv:1: expected TSV, but it does not parse"):
        read_file(tmp_path / "rows.tsv")


def test_packed_files_that_do_not_unpack(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    for raw in (b"no gzip", gzip.compress(b"{}")[:-6], b"\x1f\x8b\x08\x00" + bytes(20)):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=r"rows\.jsonl\.gz: expected a gzip file, but it does not unpack"):
            read_file(path)
    for name in ("rows.gz", "rows.parquet.gz", "rows.txt.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b"{}"))
        with pytest.raises(ValueError, match=rf"{re.escape(name)}: expected a file ending in \.jsonl.*\.gz, got"):
            read_file(tmp_path / name)


def test_parquet_and_saved_folders_with_absent_fields(tmp_path: Path) -> None:
    import datasets

    talk = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {
            "messages": [
                {"role": "user", "content": "1?"},
                {"role": "assistant", "content": None, "tool_calls": [function(arguments='{"a": 1}')]},
                {"role": "tool", "content": "1", "tool_call_id": "c"},
                {"role": "assistant", "content": "It is 1."},
            ],
        },
    ]
    whole = datasets.Dataset.from_list(talk)
    whole.to_parquet(tmp_path / "rows.parquet")
    whole.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(tmp_path / "parts")
    expected = [said(example) for example in found(*talk).examples if isinstance(example, FreeForm)]
    for name in ("rows.parquet", "saved", "parts@train"):
        task = load_task(str(tmp_path / name))
        assert [said(example) for example in task.examples if isinstance(example, FreeForm)] == expected, name
        assert task.detected is not None
        assert task.detected.format == "messages"
    calls = load_task(str(tmp_path / "saved")).examples[1]
    assert isinstance(calls, FreeForm)
    assert json.loads(calls.messages[1].calls)[0]["function"]["name"] == "add"
    assert len(load_task(str(tmp_path / "parts@test")).examples) == 1
    for name in ("parts", "parts@dev"):
        with pytest.raises(ValueError, match="has the splits train, test; choose one"):
            load_task(str(tmp_path / name))
    with pytest.raises(ValueError, match="was saved without splits; leave @train out"):
        load_task(str(tmp_path / "saved@train"))
    alpaca = datasets.Dataset.from_list([{"q": "a", "a": "b"}])
    alpaca.save_to_disk(tmp_path / "named")
    mapped = load_task(str(tmp_path / "named"), columns={"instruction": "q", "output": "a"})
    assert said(mapped.examples[0]) == [("user", "a"), ("assistant", "b")]  # type: ignore[arg-type]
    (tmp_path / "named" / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"could not read the data set '.*named'"):
        load_task(str(tmp_path / "named"))


# Requests


def test_requests_alone_read_back_and_stay_refused_without_leave(tmp_path: Path) -> None:
    rows: list[Example] = [
        FreeForm(id="a", messages=(Message(role="user", content="Name a bird."),), response=""),
        FreeForm(
            id="b",
            messages=(Message(role="system", content="Be brief."), Message(role="user", content="Name two.")),
            response="",
        ),
        FreeForm(id="c", messages=(Message(role="user", content="Hi"),), response="Hello."),
    ]
    path = tmp_path / "asked.jsonl"
    path.write_text(lines(rows))
    got = read_rows(path, requests=True)
    assert list(got.examples) == rows
    assert got.detected.requests == 2
    assert load_task(str(path), requests=True).examples == tuple(rows)
    with pytest.raises(ValueError, match=r"asked\.jsonl:1: expected the keys"):
        read_file(path)
    path.write_text(lines(rows[1:]))
    with pytest.raises(ValueError, match=r"asked\.jsonl:1: expected the last turn to be the assistant's answer"):
        read_file(path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "response": ""}, "response: expected a non-empty string"),
        ({"prompt": ""}, "prompt: expected a non-empty string"),
        ({"messages": [{"role": "system", "content": "a"}]}, "got a turn of system"),
        ({"messages": []}, "expected messages to be a list of turns"),
        ({"instruction": "a", "output": ""}, "output: expected a non-empty string"),
        ({"text": ""}, "text: expected a non-empty string"),
    ],
)
def test_empty_fields_are_no_requests(row: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"row 1: .*{message}"):
        found(row, requests=True)


# Anything


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["{}", "[]", "user", "assistant"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "weight"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), st.booleans())
def test_any_row_is_read_or_refused_by_name(row: dict[str, Any], requests: bool) -> None:
    try:
        (example,) = found(row, requests=requests).examples
    except ValueError as error:
        refusal = str(error)
    else:
        assert from_row(to_row(example), where="again", id="", requests=requests) == example
        return
    assert refusal.startswith("row 1: ")
