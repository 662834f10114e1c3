"""Tasks learned one after another: the figures by hand, the experiment, and the ledger of a model updated again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toyjob import write_rows
from typer.testing import CliRunner

from cplus import models
from cplus.base.files import read_json, write_json
from cplus.cli.app import app
from cplus.evaluation.statistics import average_accuracy, backward_transfer, survival
from cplus.jobs.update import Ledger, append, problems, read
from cplus.lab.records import load_result, save_result
from cplus.lab.sequence import bind_tasks, first_stage, run_sequence
from cplus.methods.table import METHODS
from cplus.models.scoring import predict
from cplus.toy import world
from cplus.training import driver
from cplus.training.rows import Group, PastTask, material, mean_states, refined, typical
from cplus.training.settings import SequenceSpec

TASKS = ("harbours", "craftsmen", "plants")

pytestmark = pytest.mark.usefixtures("one_thread")  # the bits of the processes that these tests start and kill


# Figures, by hand


def test_the_figures_are_those_of_a_hand_calculation() -> None:
    matrix = [[40.0, 30.0, 20.0], [90.0, 35.0, 20.0], [70.0, 80.0, 25.0], [60.0, 50.0, 100.0]]
    assert average_accuracy(matrix, 1) == 90.0
    assert average_accuracy(matrix, 2) == 75.0
    assert average_accuracy(matrix, 3) == 70.0
    assert backward_transfer(matrix) == ((60 - 90) + (50 - 80)) / 2
    assert backward_transfer(matrix[:2]) is None
    with pytest.raises(ValueError, match="from 1 to 3, got 4"):
        average_accuracy(matrix, 4)
    with pytest.raises(ValueError, match="task 1 was not evaluated after stage 2"):
        average_accuracy([[1.0], [1.0], [None, 1.0]], 2)


def test_survival_counts_a_row_as_long_as_it_was_watched() -> None:
    first = [[True, True, True], [True, True, False], [True, False, True], [False, True, True]]
    second = [[True, True], [True, False]]
    # After one stage 5 learned rows were watched and 2 lost; after two, 2 were left and 1 lost.
    assert survival([*first, *second, [True]]) == pytest.approx([100.0, 60.0, 30.0])
    assert survival([[False, True]]) == []


# The experiment


@pytest.fixture(scope="module")
def base() -> models.Loaded:
    return models.load("toy-s", device="cpu")


def spec(**changes: Any) -> SequenceSpec:
    values: dict[str, Any] = {
        "model": "toy-s", "tasks": TASKS, "interface": "cloze", "method": "cplus", "seed": 0, "num_anchors": 4,
        "num_probes": 12, "num_new": 16, "num_rows": 64, "lr": 3e-3, "weight_decay": 0.0, "epochs": 3,
        "batch_size": 8, "order": "shuffled",
    }  # fmt: skip
    return SequenceSpec(**(values | changes))


def test_a_sequence_is_its_stages_and_its_record_reads_back(base: models.Loaded, tmp_path: Path) -> None:
    own = spec(tasks=TASKS[:2])
    first = first_stage(own, base)
    result, whole = (run_sequence(own, base, tmp_path, first=shared) for shared in (first, None))
    assert result.accuracy == whole.accuracy, "the shared first stage is the sequence's own"
    assert [len(line) for line in result.accuracy] == [2] * 3
    assert result.sizes == dict.fromkeys(own.tasks, 64)
    assert [stage["retention"] is None for stage in result.stages] == [True, False]
    assert load_result(save_result(result, tmp_path)) == result
    without = dataclasses.replace(own, method="sft", num_anchors=0, num_probes=0)
    plain = run_sequence(without, base, tmp_path, first=first)
    assert plain.accuracy[:2] == result.accuracy[:2]
    assert plain.cost["preservation_rows"] == 0


def test_adapters_are_merged_and_repairs_are_made_stage_by_stage(base: models.Loaded, tmp_path: Path) -> None:
    short: dict[str, Any] = {"num_new": 4, "epochs": 1}
    adapters = spec(method="lora", num_anchors=0, num_probes=0, **short)
    assert [stage["task"] for stage in run_sequence(adapters, base, tmp_path).stages] == list(TASKS)
    repaired = spec(tasks=TASKS[:2], method="sft-repair", lr=0.0, **short)
    first, second = run_sequence(repaired, base, tmp_path).stages
    assert first["repair"] is None, "before the first task there is nothing to keep"
    assert "base and tuned model have the same weights" in second["repair"]["refused"]
    assert all(p.requires_grad for p in base.model.parameters())


def test_anchors_are_right_now_and_a_bank_is_of_the_model_that_learned_the_task(
    base: models.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[PastTask], models.Loaded]] = []

    def caught(method: Any, new: Any, kept: list[PastTask], current: models.Loaded) -> Any:
        seen.append((list(kept), current))
        return material(method, new, kept, current)

    monkeypatch.setattr(driver, "material", caught)
    run_sequence(spec(), base, tmp_path)
    [(none, _), (one, second), (two, third)] = seen
    assert none == []
    assert two[0] is one[0], "a past task's anchors and bank stay as they are"
    assert [k.written_by for k in two] == [second.fingerprint, third.fingerprint]
    rows = {task.name: task for task in bind_tasks(spec(), base)}
    for kept, model in zip(two, (second, third), strict=True):
        assert len(kept.anchors) == 4
        assert len(kept.probes) == 12
        answers = predict(model.model, rows[kept.name].interface, kept.anchors)
        assert all(answer.right for answer in answers)


def test_replay_has_all_anchors_and_ssr_the_latest_answers(base: models.Loaded) -> None:
    tasks = bind_tasks(spec(), base)
    rows = [world.taught(name)[:5] for name in TASKS[:2]]
    kept = [
        PastTask(name=task.name, interface=task.interface, anchors=tuple(own[:2]), probes=tuple(own[2:]))
        for task, own in zip(tasks, rows, strict=False)
    ]
    new = Group(name="new", part="acquisition", interface=tasks[2].interface, examples=tuple(tasks[2].examples[:4]))
    assert len(material(METHODS["replay"], new, kept, base).rows("anchors")) == 4
    assert len(material(METHODS["ssr"], new, kept, base).rows("synthetic")) == 4
    open_question = dataclasses.replace(rows[0][2], choices=("an old answer",), answer=0)
    written = dataclasses.replace(kept[0], probes=(open_question,))
    [anew] = refined(written, base, 1)
    assert anew.question == open_question.question
    assert anew.right == rows[0][2].right
    assert refined(dataclasses.replace(written, written_by=base.fingerprint), base, 1) == [open_question]


def test_ssr_keeps_the_rows_nearest_to_the_centres_of_their_clusters(base: models.Loaded) -> None:
    """Huang et al. (2024): of a bank larger than its share, some of each cluster; before, the first rows of it."""
    task = bind_tasks(spec(), base)[0]
    probes = tuple(row for name in TASKS[:2] for row in world.taught(name)[:12])
    bank = PastTask(name="past", interface=task.interface, anchors=(), probes=probes, written_by=base.fingerprint)
    kept = refined(bank, base, 4)
    states = mean_states(base.model, [task.interface.encode(row) for row in probes])
    [alone] = mean_states(base.model, [task.interface.encode(probes[0])])
    assert torch.allclose(states[0], alone, atol=1e-5), "padding is no part of a row"
    assert kept == [probes[i] for i in typical(states, 4)]
    assert {row in world.taught(TASKS[0]) for row in kept} == {True, False}
    assert refined(bank, base, 24) == list(probes)
    # As many of each cluster, nearest first.
    points = torch.cat([torch.tensor([0.3, 0.0, -0.1]) + 100.0 * centre for centre in range(20)])[:, None]
    assert typical(points, 20) == [3 * centre + 1 for centre in range(20)]
    assert typical(points, 40) == [i for i in range(60) if i % 3]
    assert typical(torch.zeros(9, 2), 5) == [0, 1, 2, 3, 4], "rows that are all alike"


# The ledger

OPTIONS = [
    "--set", "interface=cloze", "--set", "num_probes=8", "--set", "num_anchors=4", "--set", "epochs=3",
    "--set", "batch_size=4", "--set", "lr=2e-3", "--set", "stop=never", "--set", "evaluate_rows=8",
    "--set", "device=cpu", "--set", "checkpoint_steps=1",
]  # fmt: skip


def run(*arguments: object, code: int = 0) -> Any:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == code, done.output
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    """The working folder, with a ledger of three stages and a copy of it as it was after the first."""
    home = tmp_path_factory.mktemp("ledger")
    with contextlib.chdir(home):
        for name in TASKS:
            write_rows(home / f"{name}.jsonl", list(world.untaught(name)[:12]))
        write_rows(home / "keep.jsonl", list(world.taught("machines")[:4]))
        write_rows(home / "held.jsonl", list(world.taught("machines")[4:20]))
        past = ("--anchors", "keep.jsonl", "--set", "past=held.jsonl")
        run("update", "led", "--model", "toy-s", "--new", "harbours.jsonl", *past, *OPTIONS)
        shutil.copytree("led", "after-one")
        for name in TASKS[1:]:
            run("update", "led", "--new", f"{name}.jsonl", "--json")
        yield home


def test_a_ledger_tells_every_task_after_every_stage(made: Path) -> None:
    told = json.loads(run("update", "led", "--show", "--json").stdout)
    matrix = told["accuracy"]
    assert [sum(cell is not None for cell in line) for line in matrix] == [1, 2, 3, 3]
    assert told["average_accuracy"][2] == pytest.approx(sum(matrix[3]) / 3)
    assert told["backward_transfer"] == pytest.approx(sum(matrix[3][i] - matrix[i + 1][i] for i in (0, 1)) / 2)
    assert told["base"][0] is not None
    assert "backward transfer" in run("update", "led", "--show").stdout


def test_free_text_in_a_ledger_is_judged(made: Path) -> None:
    rows = {"new": world.untaught("harbours")[:6], "keep": world.taught("harbours")[:3]}
    for name, facts in rows.items():
        lines = [json.dumps({"prompt": row.question, "response": row.right}) + "\n" for row in facts]
        Path(f"free-{name}.jsonl").write_text("".join(lines))
    chosen = ("plain=true", "method=cpl", "epochs=1", "max_new_tokens=4", "device=cpu")
    options = [word for text in chosen for word in ("--set", text)]
    run("update", "free", "--model", "toy-s", "--new", "free-new.jsonl", "--anchors", "free-keep.jsonl", *options)
    record = json.loads(Path("free/stages/001/job/record.json").read_text())
    assert record["settings"]["judge"] == "exact"
    assert {own["judge"] for own in record["figures"]["sets"]} == {"exact"}
    assert all(own["after"] is not None for own in record["figures"]["sets"])


def test_a_stage_is_a_job_that_keeps_every_task_before_it(made: Path) -> None:
    ledger = read(made / "led")
    records = [json.loads(ledger.place(n).record.read_text()) for n in (1, 2, 3)]
    assert [len(record["settings"]["kept"]) for record in records] == [0, 1, 2]
    assert "2 earlier past tasks are protected as well, with 8 anchors in total." in records[2]["notes"]
    assert records[2]["settings"]["lr"] == 2e-3, "settings stand as in the last stage"
    for before, after in ((records[0], records[1]), (records[1], records[2])):
        assert after["model"]["before"] == before["model"]["after"]
        assert after["bank"]["model"]["fingerprint"] == before["model"]["after"]
    learned = {row.id for row in world.untaught("craftsmen")[:12]}
    anchors = [json.loads(line)["id"] for line in (ledger.place(3).job / "anchors.jsonl").read_text().splitlines()]
    flips = json.loads(ledger.place(2).flips.read_text())["stage 2"]
    assert set(anchors) <= learned
    assert all(flips[id] in ("kept", "gained") for id in anchors)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("weights", "stage 2: job/model/model.safetensors was changed"),
        ("bank", "stage 2: job/bank/probes.jsonl was changed"),
        ("added", "stage 3: note.txt was added"),
        ("entry", "stage 3 does not follow the entry"),
        ("last", "the last entry is not the one that was sealed"),
        ("removed", "entry 2 is marked as stage 3"),
    ],
)
def test_a_tampered_stage_is_detected(made: Path, tmp_path: Path, damage: str, sentence: str) -> None:
    root = tmp_path / "led"
    shutil.copytree(made / "led", root)
    run("update", root, "--verify")
    stages, book = root / "stages", root / "ledger.json"
    raw = json.loads(book.read_text())
    if damage in ("weights", "bank"):
        path = stages / "002" / ("job/model/model.safetensors" if damage == "weights" else "job/bank/probes.jsonl")
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    elif damage == "added":
        (stages / "003" / "note.txt").write_text("x")
    elif damage == "removed":
        del raw["stages"][1]
    else:
        raw["stages"][1 if damage == "entry" else 2]["task"] = "another"
    book.write_text(json.dumps(raw))
    told = json.loads(run("update", root, "--verify", "--json", code=2).stdout)
    assert any(line.startswith(sentence) for line in told["problems"]), told["problems"]
    if damage != "weights":
        failed = CliRunner().invoke(app, ["update", str(root), "--new", "plants.jsonl"])
        assert isinstance(failed.exception, ValueError)
        assert "a ledger that was changed cannot be updated" in str(failed.exception)


@pytest.mark.parametrize("damaged", [None, "bank/probes.jsonl", "model/model.safetensors"])
def test_a_stage_that_was_damaged_before_its_seal_is_not_sealed(made: Path, damaged: str | None) -> None:
    place = Path("unsealed") / str(damaged).partition("/")[0]
    shutil.copytree("led", place)
    for file in ("ledger.json", "stages/003"):
        path = place / file
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.copy("after-one/ledger.json", place)
    job = place / "stages" / "002" / "job"
    if damaged is None:
        assert "this job is finished" in run("update", str(place), "--new", "craftsmen.jsonl").stderr
        assert problems(read(place)) == []
        return
    whole = (job / damaged).read_bytes()
    (job / damaged).write_bytes(whole[: len(whole) // 2])
    refused = CliRunner().invoke(app, ["update", str(place), "--new", "craftsmen.jsonl"])
    assert f"remove {place / 'stages' / '002'} and repeat the update" in str(refused.exception)
    assert len(read(place).entries) == 1


def test_what_a_ledger_would_run_must_be_repeated(made: Path) -> None:
    shutil.copytree("after-one", "received")
    ledger = read(Path("received"))
    record = read_json(ledger.place(1).record)
    write_json(ledger.place(1).record, {**record, "settings": {**record["settings"], "method": "python:hostile:ROW"}})
    entry = ledger.entries[0]
    append(Ledger(root=ledger.root), task=entry.task, before=entry.before, after=entry.after, created=entry.created)
    refused = CliRunner().invoke(app, ["update", "received", "--new", "craftsmen.jsonl"])
    assert "received: expected what can run code to be repeated" in str(refused.exception)
    assert "add --set method=python:hostile:ROW if you trust it" in str(refused.exception)
    assert not ledger.place(2).root.exists()


FIRST = ("--model", "toy-s", "--new", "harbours.jsonl")


@pytest.mark.parametrize(
    ("folder", "given", "words"),
    [
        ("new", ("--new", "harbours.jsonl"), "the model to start from"),
        ("new", FIRST[:2], "expected new"),
        ("new", (*FIRST, "--set", "interface=cloze"), "needs anchors"),
        ("new", (*FIRST, "--set", "lora=r=4,merge=false"), "leave out merge=false"),
        ("unsealed", FIRST, "it is not a ledger"),
        ("led", FIRST, "leave the model out"),
        ("led", ("--show", "--new", "a.jsonl"), "--show stands alone"),
        ("led", ("--set", "new=plants", "--set", "out=b"), "an update sets 'out' itself; leave it out"),
    ],
)
def test_an_update_that_cannot_work_says_so(made: Path, folder: str, given: tuple[str, ...], words: str) -> None:
    Path("unsealed/other").mkdir(parents=True, exist_ok=True)
    failed = CliRunner().invoke(app, ["update", folder, *given])
    assert words in str(failed.exception)
    assert not Path("new/ledger.json").exists()


def test_an_update_continues_the_folder_of_a_job(made: Path) -> None:
    run("adapt", "toy-s", "--new", "harbours.jsonl", "--anchors", "keep.jsonl", "--out", "out", *OPTIONS)
    before = json.loads(Path("out/record.json").read_text())
    again = CliRunner().invoke(app, ["update", "out", "--model", "toy", "--new", "plants.jsonl"])
    assert "leave the model out" in str(again.exception)
    run("update", "out", "--new", "plants.jsonl")
    stage = json.loads(Path("out/stages/001/job/record.json").read_text())
    assert stage["model"]["before"] == before["model"]["after"]
    assert any("1 earlier past tasks are protected" in note for note in stage["notes"])
    assert stage["settings"]["lr"] == before["settings"]["lr"]
    assert json.loads(Path("out/record.json").read_text()) == before
    run("update", "out", "--verify")
