"""The receipt says what its rows say, in a page that comes from the record alone."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import receipts
import typer
from receipts import HOSTILE, row
from typer.testing import CliRunner

from cplus import models
from cplus.base import files
from cplus.cli.receipt import receipt as receipt_command
from cplus.data.examples import Choice, FreeForm, Message, Prediction
from cplus.evaluation.requirements import parse
from cplus.receipts import page as module
from cplus.receipts.contents import (
    Beside,
    Divergence,
    ModelId,
    Point,
    Receipt,
    Repair,
    RowComparison,
    RowSet,
    TunedSet,
    compare,
)
from cplus.receipts.figures import figures
from cplus.receipts.page import charts, from_json, read_receipt, render, to_json, write_receipt
from cplus.receipts.verdict import headline, sentences
from cplus.training.measure import GroupAnswers
from cplus.training.rows import Group


def small(*sets: RowSet, **given: Any) -> Receipt:
    """A receipt of these sets and little else."""
    names = {"before": ModelId(name="a", fingerprint="0"), "after": ModelId(name="b", fingerprint="1")}
    return Receipt(title="small", created="2026-01-01", sets=sets, **names, **given)


def some(kind: str, counts: dict[str | None, int], *, name: str = "rows", **given: Any) -> RowSet:
    """A set with so many rows of each outcome."""
    made = [row(f"{outcome}-{i}", outcome, **given) for outcome, count in counts.items() for i in range(count)]
    return RowSet(name=name, kind=kind, interface="letter", rows=tuple(made))  # type: ignore[arg-type]


def resealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a hash that fits whatever it now says."""
    body = {key: value for key, value in record.items() if key != "sha256"}
    return {**body, "sha256": files.fingerprint(body)}


def wilson(right: int, total: int) -> tuple[float, float]:
    """Wilson's interval, written out."""
    z, p = 1.959963984540054, right / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return 100 * (middle - half), 100 * (middle + half)


def figured(made: Receipt) -> Any:
    return to_json(made)["figures"]


def said(made: Receipt) -> str:
    return headline(figured(made)).replace("\u00a0", " ")


def alterations(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record with one value changed: an outcome, a figure, the notes, the hash."""
    for places, value in (
        (("receipt", "sets", 0, "rows", 0, "kind"), "kept"),
        (("figures", "retention", "percent"), 99.9),
        (("notes",), []),
        (("sha256",), "0" * 64),
    ):
        made: Any = json.loads(json.dumps(record))
        part = made
        for place in places[:-1]:
            part = part[place]
        part[places[-1]] = value
        yield made


def test_a_record_is_read_as_it_was_written_and_an_altered_one_has_no_page() -> None:
    full = receipts.full()
    record = to_json(full)
    assert from_json(json.loads(json.dumps(record))) == full
    render(record)
    for altered in alterations(record):
        with pytest.raises(ValueError, match="the record was altered"):
            render(altered)


def test_a_record_of_another_version_or_shape_is_refused_by_name() -> None:
    record = to_json(receipts.full())
    with pytest.raises(
        ValueError,
        match=r"expected a record of schema 4, got schema 1: another version wrote it; make the receipt again",
    ):
        from_json(resealed({**record, "schema": 1}))
    with pytest.raises(ValueError, match="here: surprise: Unexpected"):
        from_json(resealed({**record, "receipt": {**record["receipt"], "surprise": 1}}), where="here")
    record["receipt"]["sets"][1]["rows"][2]["confidence_after"] = 1.5
    with pytest.raises(ValueError, match=r"sets\.1\.rows\.2\.confidence_after: .*less than or equal to 1, got 1\.5"):
        from_json(resealed(record))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: small(), r"sets: .*at least 1 item"),
        (lambda: small(some("task", {"kept": 1}, confidence_after=math.nan)), "confidence_after: .*finite"),
        (lambda: small(some("task", {"kept": 1}), some("task", {"lost": 1})), "different set names, got 'rows'"),
        (
            lambda: small(RowSet(name="x", kind="task", interface="cloze", rows=(row("a", "kept"), row("a", "lost")))),
            "different ids in set 'x', got 'a'",
        ),
    ],
)
def test_values_that_cannot_be_are_refused_before_anything_is_written(
    made: Callable[[], Receipt], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        write_receipt(made(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shares_have_wilson_bounds() -> None:
    past = some("retention", {"kept": 90, "lost": 10}, name="past")
    new = some("acquisition", {"gained": 47, "still_wrong": 1}, name="new")
    made = small(past, new, some("external", {"lost": 40, "gained": 3}, name="far"))
    kept, learned = (figured(made)[name] for name in ("retention", "acquisition"))
    assert (kept["right"], kept["total"], learned["right"], learned["total"]) == (90, 100, 47, 48)
    assert (kept["low"], kept["high"]) == pytest.approx(wilson(90, 100))
    assert (learned["low"], learned["high"]) == pytest.approx(wilson(47, 48))
    assert said(made) == "Kept 90.0 % of what it knew and learned 97.9 % of the new rows it had wrong."


def test_a_whole_task_counts_for_retention_and_for_acquisition() -> None:
    made = small(some("task", {"kept": 3, "lost": 1, "gained": 1, "still_wrong": 4}))
    found = figured(made)
    assert (found["retention"]["percent"], found["acquisition"]["percent"]) == (75.0, 20.0)
    assert (found["sets"][0]["before"]["right"], found["sets"][0]["after"]["right"]) == (4, 4)
    assert said(made) == "Kept 75.0 % of the right answers and corrected 20.0 % of the wrong ones."
    # The exact test is taken only where rows could change both ways.
    chosen = some("retention", {"kept": 90, "lost": 9}, name="past")
    whole = some("task", {"kept": 50, "lost": 9, "gained": 1, "still_wrong": 40}, name="whole")
    # 2 (1 + 10) / 2^10: nine or more of ten fair coins on one side
    assert [own["mcnemar_p"] for own in figured(small(chosen, whole))["sets"]] == [None, pytest.approx(22 / 1024)]


def test_losses_and_their_rise_are_one_kind_of_mean() -> None:
    long = row("long", None, tokens=30, nll_before=1.0, nll_after=2.0)
    short = row("short", None, tokens=10, nll_before=2.0, nll_after=2.0)
    found = figured(small(RowSet(name="chat", kind="retention", interface="freeform", rows=(long, short))))
    losses = found["sets"][0]["nll"]
    # 30 tokens rise by 1 and 10 by 0: means over tokens, so that after - before is the rise.
    assert (losses["before"], losses["after"], losses["rise"]) == (1.25, 2.0, 0.75)
    assert found["retention"] is None
    assert found["sets"][0]["counts"]["unjudged"] == 2


def chat(*, after: float, answers: int = 24, **given: Any) -> Receipt:
    """A chat job: 14 past rows whose loss rises a little, and 24 new rows, of which some answers are as given."""
    past = receipts.answered([("a", "b")] * 14, [(0.586, 0.586 + 0.01 * (i % 3)) for i in range(14)])
    texts = [("Jakarta", " jakarta " if i < answers else "Bandung") for i in range(24)]
    new = receipts.answered(texts, [(4.35, after)] * 24, name="new")
    return small(
        RowSet(name="past", kind="retention", interface="freeform", rows=past),
        RowSet(name="new", kind="acquisition", interface="freeform", rows=new),
        *given.pop("more", ()),
        **given,
    )


def everyday(kept: int, lost: int, *, gained: int = 0, wrong: int = 0, stopped: int = 0) -> RowSet:
    """An ability's requests by outcome; of the answers, all ended before, and all but some do now."""
    counts = {"kept": kept, "lost": lost, "gained": gained, "still_wrong": wrong}
    made = [row(f"{kind} {i}", kind) for kind, count in counts.items() for i in range(count)]
    ended = [dataclasses.replace(own, ended_before=True, ended_after=i >= stopped) for i, own in enumerate(made)]
    return RowSet(name="everyday", kind="ability", interface="freeform", rows=tuple(ended), judge="rules")


def test_a_kept_model_is_named_with_its_counts() -> None:
    text = said(chat(after=0.4, answers=22, more=(everyday(28, 1, wrong=31),)))
    assert text == (
        "Kept: 28 of 29 everyday answers still right and 60 of 60 answers that ended still end. "
        "New rows: 22 of 24 answers as given, loss 4.350 to 0.400 on the rows trained on."
    )


def test_a_damaged_model_is_named_with_the_rows_it_lost() -> None:
    found = figured(chat(after=0.4, more=(everyday(20, 10, gained=1, wrong=29, stopped=40),)))
    assert found["verdict"] == "damaged"
    assert headline(found).startswith(
        "Damaged: 10 of 30 everyday answers lost (lost 0, lost 1, lost 2, lost 3, lost 4, lost 5, lost 6, lost 7 and 2 "
        "more); 40 of 60 answers no longer end. New rows: "
    )
    everyday_line, stopping = found["lines"]
    # One-sided: ten or more of eleven fair coins, at half of 5 % because there are two lines.
    assert everyday_line["p"] == pytest.approx(12 / 2**11)
    assert (everyday_line["needed"], everyday_line["low"] > 0, stopping["verdict"]) == (6, True, "damaged")
    assert '<section class="verdict unmet"' in render(to_json(chat(after=0.4, more=(everyday(20, 10),))))


@pytest.mark.parametrize(
    ("own", "verdict", "words"),
    [
        (everyday(15, 5, wrong=40), "unclear", "5 of 20 everyday answers lost, 0 gained, which may be chance"),
        (everyday(4, 0, wrong=56), "unclear", "the base model shows too little of everyday to judge"),
        (everyday(20, 2, gained=2), "kept", "20 of 22 everyday answers still right"),
        (everyday(12, 8, gained=7), "kept", "12 of 20 everyday answers still right"),
    ],
)
def test_a_loss_that_chance_explains_is_no_damage(own: RowSet, verdict: str, words: str) -> None:
    assert figured(small(own))["verdict"] == verdict
    assert words in said(small(own))


def test_an_ability_that_the_base_model_does_not_show_is_not_judged() -> None:
    own = everyday(4, 0, wrong=56)
    silent = dataclasses.replace(own, rows=tuple(dataclasses.replace(r, ended_before=None) for r in own.rows))
    assert said(small(silent)) == (
        "Not judged whether abilities were kept: the base model gets 4 of 60 everyday requests right (10 needed)."
    )


def test_a_job_that_learned_nothing_says_so_first() -> None:
    text = said(chat(after=4.35, answers=0, more=(everyday(20, 10),)))
    assert text.startswith("Nothing was learned. New rows: 0 of 24 answers as given, loss 4.350 to 4.350")
    assert "Damaged:" in text
    assert said(small(some("acquisition", {"still_wrong": 9}))).startswith("Nothing was learned. Learned 0 %")
    assert not said(chat(after=4.0, answers=0)).startswith("Nothing")


@pytest.mark.parametrize(
    ("given", "answer", "words"),
    [
        ("12", "so 12", "0 of 3 answers as given (compared as numbers)"),
        ("12", "12.0", "3 of 3 answers as given (compared as numbers)"),
        ('{"a": [1, 2]}', '{ "a": [1,2] }', "3 of 3 answers as given (compared as JSON)"),
        ("word " * 40, "other", "long answers, compared by their loss"),
    ],
)
def test_answers_are_compared_by_their_kind(given: str, answer: str, words: str) -> None:
    made = [row(f"new-{i}", None, gold=given, before=None, after=answer) for i in range(3)]
    new = RowSet(name="new", kind="acquisition", interface="freeform", rows=tuple(made))
    assert words in said(small(new))


def test_a_held_out_loss_that_rises_again_is_called_memorising() -> None:
    def curve(*held: float) -> tuple[Point, ...]:
        return tuple(Point(epoch=float(i), new_nll=3.0 - i / 2, validation_nll=loss) for i, loss in enumerate(held))

    assert "Memorising from epoch 3 on" in said(chat(after=0.4, curve=curve(3.0, 2.5, 2.2, 2.4, 2.6)))
    for held in ((3.0, 2.5, 2.2, 2.1), (3.0, 2.5, 2.2, 2.205), (3.0, 2.0)):
        assert "Memorising" not in said(chat(after=0.4, curve=curve(*held)))


def test_plain_fine_tuning_is_shown_beside_the_job() -> None:
    moved = Divergence(rows=40, after=0.2, bfloat16=0.0001, q8_0=0.0004)
    other = Beside(
        method="sft",
        level=0.4,
        reached=True,
        updates=21,
        seconds=60.0,
        sets=(everyday(12, 18, wrong=30, stopped=5), chat(after=0.3, answers=20).sets[1]),
        divergence=dataclasses.replace(moved, after=0.5),
    )
    made = chat(after=0.4, more=(everyday(29, 1, wrong=30),), divergence=moved, beside=other, method="cplus")
    text = " ".join(sentences(figured(made)))
    assert (
        "Plain fine-tuning (21 updates, at the same loss of new rows): 20 of 24 answers as given; 12 of 30 everyday "
        "answers still right; 55 of 60 answers that ended still end; KL 0.500 from the base."
    ) in text
    assert "moved 0.200 nats per token (KL) from its base at 40 held-out past rows" in text
    assert "plain fine-tuning: 12 of 30" in render(to_json(made))


def test_a_repair_that_helped_is_not_called_damage() -> None:
    tuned = ModelId(name="tuned", fingerprint="2")
    sets = (TunedSet(name="past", nll=2.0), TunedSet(name="everyday", right=30.0))
    repair = Repair(tuned=tuned, undone=10, moved=100, sets=sets)
    text = said(chat(after=0.4, more=(everyday(20, 10, wrong=30),), repair=repair))
    assert text.startswith("The repair helped. Still damaged: 10 of 30 everyday answers lost")
    assert "right answers on everyday 30.0 % to 33.3 %" in text
    worse = dataclasses.replace(repair, sets=(TunedSet(name="past", nll=0.5),))
    assert "It did not improve the past rows" in said(chat(after=0.4, repair=worse))


def test_one_row_has_a_loss_but_no_interval_and_no_plus_minus() -> None:
    past = receipts.answered([("a", "b")], [(0.5, 0.9)])
    made = small(RowSet(name="past", kind="retention", interface="freeform", rows=past))
    assert "0.500 nats per token before, 0.900 after (+0.400; 1 response" in " ".join(sentences(figured(made)))
    assert "±" not in render(to_json(made))


def test_anchors_are_never_called_what_it_knew() -> None:
    closed = RowSet(**{**vars(some("retention", {"kept": 9, "lost": 1}, name="anchors")), "anchors": True})
    assert said(small(closed)) == "Kept 90.0 % of its right answers on the anchors it was protected by."
    held_out = some("retention", {"kept": 5, "lost": 5}, name="past")
    assert said(small(closed, held_out)) == "Kept 50.0 % of what it knew."


def test_learning_on_held_out_new_rows_is_shown_apart() -> None:
    new = some("acquisition", {"gained": 10}, name="new")
    unseen = some("validation", {"gained": 1, "still_wrong": 3, "kept": 2}, name="validation")
    made = small(new, unseen)
    assert said(made) == "Learned 100 % of the new rows it had wrong and learned 25.0 % of the new rows held out."
    assert figured(made)["acquisition"]["total"] == 10
    whole = "Of all held-out new rows, 33.3\u00a0% were answered right before and 50.0\u00a0% are now."
    assert whole in sentences(figured(made))
    curve = tuple(Point(epoch=float(e), acquisition=50.0 * e, validation=25.0 * e) for e in range(3))
    titles = [chart["title"] for chart in charts(dataclasses.replace(made, curve=curve))]
    assert titles == ["Acquisition (%): trained on and held out"]  # the line of the rows trained on is not drawn again
    assert "Acquisition the share of new rows wrong" in render(to_json(dataclasses.replace(made, curve=curve)))
    spoken = receipts.answered([("a", "b")] * 3, [(4.0, 3.5)] * 3, name="unseen")
    free = chat(after=2.87)
    held = RowSet(name="validation", kind="validation", interface="freeform", rows=spoken)
    points = tuple(Point(epoch=float(e), new_nll=4.35 - e, validation_nll=4.0 - e / 4, past_nll=0.6) for e in range(3))
    made = dataclasses.replace(free, sets=(*free.sets, held), curve=points)
    assert said(made).endswith(
        "New rows: 24 of 24 answers as given, loss 4.350 to 2.870 on the rows trained on, 4.000 to 3.500 on rows held "
        "out."
    )
    page = render(to_json(made))
    assert "new rows held out" in page
    assert "New loss: trained on and held out" in page


def test_free_text_has_outcomes_only_with_a_named_judge() -> None:
    rows = tuple(row(f"r{i}", "lost" if i else "kept", before="x", after="x") for i in range(4))
    unjudged = small(RowSet(name="past", kind="retention", interface="freeform", rows=rows))
    assert figured(unjudged)["retention"] is None
    assert said(unjudged) == "No answer was judged."
    assert figured(unjudged)["sets"][0]["answers"] == {"same": 4, "changed": 0}
    judged = small(RowSet(name="past", kind="retention", interface="freeform", rows=rows, judge="exact"))
    assert said(judged) == "Kept 25.0 % of what it knew."
    assert "judge exact" in render(to_json(judged))


@pytest.mark.parametrize(("kept", "lost", "red"), [(120, 8, False), (50, 78, True)])
def test_a_large_share_of_lost_answers_has_a_red_frame(kept: int, lost: int, red: bool) -> None:
    page = render(to_json(small(some("retention", {"kept": kept, "lost": lost}))))
    assert ('<section class="verdict unmet"' in page) is red


def test_losses_are_required_by_their_upper_bound() -> None:
    texts = ("past-loss<=+0.05", "past-loss<=0.007", "new-loss<=3", "new-loss<=2.8", "retention>=0")
    made = chat(after=2.87, requirements=tuple(map(parse, texts)))
    found = figured(made)
    assert [one["met"] for one in found["requirements"]] == [True, False, True, False, False]
    assert found["requirements"][0]["bound"] == found["free"]["past"]["loss"]["high"]
    assert found["requirements"][4]["bound"] is None
    assert "past-loss at most +0.05; its upper 95 % bound is +0.01" in render(to_json(made))


def test_a_requirement_is_held_against_the_lower_bound() -> None:
    asked = tuple(map(parse, ("retention>=0.67", "retention>=0.7", "acquisition>=0")))
    found = figured(small(some("retention", {"kept": 8}), requirements=asked))["requirements"]
    assert [one["bound"] for one in found[:2]] == pytest.approx([wilson(8, 8)[0] / 100] * 2)
    assert [one["met"] for one in found] == [True, False, False]
    assert found[2] == {"metric": "acquisition", "at_least": 0.0, "at_most": None, "bound": None, "met": False}


def answered(id: str, answer: int | str, correct: bool | None) -> Prediction:
    return Prediction(id=id, answer=answer, correct=correct, confidence=0.5, scores=(0.0,), num_tokens=(1,))


def compared(example: Choice | FreeForm, interface: str, before: Prediction, after: Prediction) -> RowComparison:
    """The one row of a group with this interface."""
    bound: Any = SimpleNamespace(name=interface)
    group = Group(name="new", part="acquisition", interface=bound, examples=(example,))
    answers = [GroupAnswers(predictions=(prediction,)) for prediction in (before, after)]
    (made,) = compare(group, *answers, judge="none").rows
    return made


def test_rows_say_what_was_asked_and_answered() -> None:
    example = Choice(id="q", question="Is ice cold?", choices=("no", "yes"), answer=1)
    made = compared(example, "letter", answered("q", 1, True), answered("q", 0, False))
    assert (made.id, made.kind, made.input) == ("q", "lost", "Is ice cold?\n  A: no\n  B: yes")
    assert (made.gold, made.before, made.after) == ("B: yes", "B: yes", "A: no")
    assert (made.confidence_before, made.confidence_after) == (0.5, 0.5)
    by_text = compared(example, "cloze", answered("q", 1, True), answered("q", 0, False))
    assert by_text.gold == "yes"


def test_rows_nobody_judged_have_no_outcome_and_other_rows_are_refused() -> None:
    turns = (Message(role="system", content="Be brief."), Message(role="user", content="Hi"))
    example = FreeForm(id="q", messages=turns, response="Hello.")
    made = compared(example, "freeform", answered("q", "Hello.", None), answered("q", "Yo.", None))
    assert (made.kind, made.input, made.before, made.after) == (None, "system: Be brief.\nuser: Hi", "Hello.", "Yo.")
    with pytest.raises(ValueError, match="the same rows before and after"):
        compared(example, "freeform", answered("q", "Hello.", True), answered("p", "Yo.", True))


def test_the_page_shows_the_record_s_hash_escapes_all_text_and_names_no_address() -> None:
    record = to_json(receipts.full())
    page = render(record)
    assert record["sha256"] in page
    assert HOSTILE not in page
    assert "<script>document" not in page
    assert "<img" not in page
    assert "http://" not in page
    assert "https://" not in page
    assert page == render(json.loads(json.dumps(record)))


def test_an_edited_page_or_record_is_found(tmp_path: Path) -> None:
    write_receipt(receipts.full(), tmp_path)
    assert read_receipt(tmp_path) == receipts.full()
    page = tmp_path / "receipt.html"
    untouched = page.read_text()
    page.write_text(untouched.replace("Kept 91.0", "Kept 99.0"))
    with pytest.raises(ValueError, match=r"receipt\.html: the page was edited, or is of another record"):
        read_receipt(tmp_path)
    page.write_text(untouched)
    for record in alterations(files.read_json(tmp_path / "record.json")):
        files.write_json(tmp_path / "record.json", record)
        with pytest.raises(ValueError, match=r"record\.json: the record was altered"):
            read_receipt(tmp_path)


def test_a_receipt_is_read_after_a_change_of_template_words_or_thresholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr(module, "render", lambda record: "<p>another template, other words</p>")
        other.setattr(module, "figures", lambda receipt: {**figures(receipt), "free": {}})
        written = write_receipt(receipts.full(), tmp_path)
    assert read_receipt(tmp_path) == receipts.full()
    assert module.read_record(tmp_path) == written
    assert written["figures"]["free"] == {}, "what was measured then is not measured again"


def test_a_receipt_of_its_own_file_is_read(tmp_path: Path) -> None:
    record = to_json(receipts.full())
    old = {name: record[name] for name in ("created", "environment", "notes", "settings", "figures")}
    gone = {"noise_floor": 0.1, "comparisons": {"sft": {"curve": [], "settings": {}}}}
    old = json.loads(json.dumps({**old, **record["receipt"], **gone, "schema": 2}))
    for each in (each for own in old["sets"] for each in own["rows"]):
        each["answer_nll_before"] = None
    old = resealed(old)
    files.write_json(tmp_path / "receipt.json", old)
    files.write_json(tmp_path / "record.json", files.sealed({"schema": 1, "receipt": old["sha256"]}))
    (tmp_path / "receipt.html").write_text("<p>rendered by an earlier version</p>")
    assert read_receipt(tmp_path) == receipts.full()
    assert run("--verify", str(tmp_path)).exit_code == 0
    files.write_json(tmp_path / "receipt.json", {**old, "notes": []})
    with pytest.raises(ValueError, match=r"receipt\.json: the record was altered"):
        read_receipt(tmp_path)
    write_receipt(receipts.full(), tmp_path)
    assert module.read_record(tmp_path)["schema"] == 4
    parts = {name: value for name, value in old.items() if name in record["receipt"] or name in gone}
    third = resealed({**{name: record[name] for name in module.PARTS & record.keys()}, "receipt": parts, "schema": 3,
                      "figures": {"free": {"past": {"effect": "kept"}}}})  # fmt: skip
    assert from_json(third) == receipts.full()
    assert module.current(third)["figures"] == record["figures"]
    assert "What it kept" in render(third)


@pytest.fixture
def two_models(tmp_path: Path, make_tiny: Callable[[str], Any]) -> tuple[str, str]:
    """Two folders: a tiny model, and the same with one weight matrix turned."""
    tiny = make_tiny("llama")
    models.save(tiny.model, tiny.tokenizer, tmp_path / "before")
    tiny.model.lm_head.weight.data = tiny.model.lm_head.weight.data.roll(1, 1)
    models.save(tiny.model, tiny.tokenizer, tmp_path / "after")
    return str(tmp_path / "before"), str(tmp_path / "after")


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(receipt_command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_compares_any_two_models(two_models: tuple[str, str], tmp_path: Path) -> None:
    asked = [
        {"id": f"q{i}", "question": f"Which is {i}?", "choices": ["a dog", "water", "blue"], "answer": i % 3}
        for i in range(12)
    ]
    spoken = [{"id": f"s{i}", "prompt": f"Say {i}", "response": f"{i}."} for i in range(3)]
    for name, lines in (("asked", asked), ("spoken", spoken)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = [option for name in ("asked", "spoken") for option in ("--data", str(tmp_path / f"{name}.jsonl"))]
    out = str(tmp_path / "out")
    done = run(*two_models, *data, "--out", out, "--set", "max_new_tokens=4", "--json")
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    made = read_receipt(tmp_path / "out")
    assert printed["sha256"] == files.read_json(tmp_path / "out" / "record.json")["sha256"]
    assert [(own.name, own.kind, own.interface, len(own.rows)) for own in made.sets] == [
        ("asked.jsonl", "task", "letter", 12),
        ("spoken.jsonl", "task", "freeform", 3),
    ]
    assert all(row.nll_after is not None and row.tokens for row in made.sets[1].rows)
    assert made.before.fingerprint != made.after.fingerprint

    verified = run("--verify", out)
    assert verified.exit_code == 0
    assert "receipt.html" in verified.stdout
    unmet = run(*two_models, *data, "--out", out, "--set", "max_new_tokens=4", "--require", "acquisition>=0.7")
    assert unmet.exit_code == 2
    assert "NOT MET: acquisition at least 0.7" in unmet.stdout


def test_the_command_measures_free_text_by_loss_unless_a_judge_is_chosen(
    two_models: tuple[str, str], tmp_path: Path
) -> None:
    spoken = [{"id": f"s{i}", "prompt": f"Say {i}", "response": f"{i}."} for i in range(4)]
    (tmp_path / "spoken.jsonl").write_text("".join(json.dumps(line) + "\n" for line in spoken))
    asked = (*two_models, "--data", str(tmp_path / "spoken.jsonl"), "--out", str(tmp_path / "out"))
    done = run(*asked, "--set", "max_new_tokens=4", "--require", "past-loss<=+9", "--require", "new-loss<=0.001")
    assert done.exit_code == 2, done.output
    assert "Met: past-loss at most +9" in done.stdout
    assert "NOT MET: new-loss at most 0.001" in done.stdout
    (own,) = read_receipt(tmp_path / "out").sets
    assert (own.judge, own.judged, {row.kind for row in own.rows}) == ("none", False, {None})
    judged = run(*asked, "--set", "max_new_tokens=4", "--judge", "contains", "--json")
    assert json.loads(judged.stdout)["figures"]["acquisition"]["total"] == 4
    assert read_receipt(tmp_path / "out").sets[0].judge == "contains"


@pytest.mark.parametrize(
    ("required", "said"),
    [
        ("retention>=0.9", "needs judged answers, and no judge was chosen for free text; choose one with --judge"),
        ("retention>=1.5", "with a share from 0 to 1"),
        ("past-loss>=0.1", "expected retention>=SHARE"),
    ],
)
def test_the_command_refuses_a_requirement_before_it_loads_a_model(required: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "Hi", "response": "Hello."}\n' * 2)
    done = run("no-such-model", "nor-this", "--data", str(tmp_path / "a.jsonl"), "--require", required)
    assert said in str(done.exception)


def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    assert "expected two models and --data" in str(run("toy").exception)
    assert "expected each --data once, got plants" in str(
        run("toy", "toy", "--data", "plants", "--data", "plants", "--out", str(tmp_path / "out")).exception
    )
    assert isinstance(run("--verify", str(tmp_path)).exception, FileNotFoundError)
