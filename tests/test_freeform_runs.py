"""Runs in free text: what is right, what is kept, what is refused, and methods compared at matched learning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cplus import lab, models
from cplus.core.losses import answer_losses
from cplus.core.rows import Encoded
from cplus.data.examples import FreeForm, Message
from cplus.data.interfaces import build
from cplus.evaluation.statistics import crossing
from cplus.jobs.api import encode
from cplus.lab import SCALES, STUDIES, chat, runner, runs
from cplus.lab.chat import comparison as comparison_lines
from cplus.lab.chat import fig_chat, tab_chat
from cplus.lab.drawing import draw
from cplus.lab.records import RunResult, load_result, save_result
from cplus.lab.report import collect
from cplus.lab.runs import Comparison, begun, external_task, new_rows, run, set_up, split_task
from cplus.models.decoding import LocalEngine
from cplus.models.scoring import log_likelihoods, repeated
from cplus.training.settings import RunSpec, SequenceSpec

WORDS = ("tin", "oak", "rye", "ash", "elm", "fig", "hay", "ivy")
REQUESTS = [f"Say {word} and {word} again." for word in WORDS]
"""What the little model answers; a further request it was never taught."""


def conversation(request: str, response: str = "?") -> FreeForm:
    return FreeForm(id=request, messages=(Message(role="user", content=request),), response=response)


@pytest.fixture(scope="module")
def world(make_tiny: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A tiny model that answers the requests with two words and an end, and files of what to keep and to learn."""
    folder, tiny = tmp_path_factory.mktemp("world"), make_tiny("llama")
    interface = build("freeform", tiny.tokenizer)
    taught = [conversation(request, f"{word} {word}") for request, word in zip(REQUESTS, WORDS, strict=True)]
    rows = [interface.encode(example) for example in taught]
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    for _ in range(80):
        optimizer.zero_grad()
        answer_losses(tiny.model, rows).mean().backward()
        optimizer.step()
    assert all(score.likeliest for score in log_likelihoods(tiny.model, rows))
    tiny.model.save_pretrained(folder / "model")
    tiny.tokenizer.save_pretrained(folder / "model")
    asked = [{"prompt": request, "response": "never said"} for request in REQUESTS]
    (folder / "keep.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    learn = [{"question": f"Which is {i}?", "choices": ["a", f"b{i}"], "answer": i % 2} for i in range(6)]
    (folder / "learn.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learn))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPLUS_CACHE", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def spec(world: Path) -> RunSpec:
    """Four new rows beside two anchors; the curve is evaluated every epoch."""
    return RunSpec(
        model=str(world / "model"), task=str(world / "learn.jsonl"), anchor_task=str(world / "keep.jsonl"),
        interface="freeform", method="sft", seed=0, num_anchors=2, num_probes=0, num_new=4, lr=3e-3, weight_decay=0.0,
        epochs=3, batch_size=2, evaluate_every=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def given(spec: RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    base = models.load(spec.model, device="cpu")
    kept = split_task(base, spec.anchor_task, "freeform", kept=True)
    return set_up(spec, base, split_task(base, spec.task, "freeform"), tmp_path_factory.mktemp("banks"), kept=kept)


def test_one_pass_says_what_greedy_decoding_says(tiny: Any) -> None:
    prompts = [build("freeform", tiny.tokenizer).prompt(conversation(request)) for request in REQUESTS[:4]]
    found = LocalEngine(tiny.model, tiny.tokenizer).greedy(prompts, max_new_tokens=5, word_first=False)
    rows = [Encoded(prompt, tuple(own.tokens)) for prompt, own in zip(prompts, found, strict=True)]
    for place in range(3):  # and one token of each answer another
        for row in rows[: len(prompts)]:
            rows.append(Encoded(row.prompt, tuple(t ^ 1 if i == place else t for i, t in enumerate(row.target))))
    assert [score.likeliest for score in log_likelihoods(tiny.model, rows)] == [True] * 4 + [False] * 12


def test_what_is_kept_are_the_models_own_answers_and_what_is_learned_is_terse(given: Comparison, spec: RunSpec) -> None:
    own = [example.response for example in given.split.past if isinstance(example, FreeForm)]
    assert own == [f"{word} {word}" for word in WORDS]
    assert (given.split.new, given.wrong) == ((), None)
    assert len(new_rows(split_task(given.base, spec.task, "freeform")[1], replace(spec, num_new=None))) == 6
    trained = begun(spec, given).prepared.material.new
    assert list(trained) == encode(given.new.examples, given.base.tokenizer)
    assert {e.response for e in given.new.examples if isinstance(e, FreeForm)} <= {"a", "b1", "b3", "b5"}
    assert all(answer.right and answer.answer for answer in given.split.predictions)
    assert not any(answer.right or answer.answer for answer in given.new.known)


def test_a_request_without_an_end_is_left_out(
    world: Path, spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cplus.probes import labels

    monkeypatch.setitem(labels.MAX_ANSWER_TOKENS, "freeform", 2)  # every taught answer is longer
    monkeypatch.setattr(labels, "LONGER", 1)
    monkeypatch.setenv("CPLUS_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"none of the 8 .*keep\.jsonl rows was answered before the token limit"):
        split_task(models.load(spec.model, device="cpu"), spec.anchor_task, "freeform", kept=True)


def test_a_run_knows_both_losses_from_the_base_model_on(given: Comparison, spec: RunSpec, tmp_path: Path) -> None:
    result = run(spec, given)
    assert [point["epoch"] for point in result.curve] == [0.0, 1.0, 2.0, 3.0]
    start, end = result.curve[0], result.curve[-1]
    anchors = {example.id for example in given.anchors}
    asked = [given.past.interface.encode(example) for example in given.past.examples]
    assert anchors.isdisjoint(example.id for example in given.past.examples)
    trained = {example.id for example in given.new.examples}
    held = [e for e in split_task(given.base, spec.task, "freeform")[1].new if e.id not in trained]
    scores = log_likelihoods(given.base.model, [given.new.interface.encode(example) for example in held])
    expected = -sum(score.total for score in scores) / sum(score.num_tokens for score in scores)
    assert (len(held), start["held_nll"]) == (2, pytest.approx(expected, rel=1e-5))
    assert len(given.bases) == len(asked)
    assert start["divergence"] == 0.0 < result.curve[1]["divergence"] < end["divergence"] == result.divergence
    still = run(replace(spec, lr=0.0, epochs=1), given)
    scores = log_likelihoods(given.base.model, asked)
    expected = -sum(score.total for score in scores) / sum(score.num_tokens for score in scores)
    assert (still.retention, still.acquisition) == (100.0, 0.0)
    assert still.past_nll == pytest.approx(expected, rel=1e-5)
    assert result.past_nll is not None and result.new_nll is not None and still.new_nll is not None  # noqa: PT018
    assert (result.new_nll < still.new_nll, result.past_nll > still.past_nll) == (True, True)
    assert result.once == {"before_flops": 0, "after_flops": 0, "writing_flops": 0}
    ended = run(replace(spec, stop_loss=result.curve[1]["held_nll"]), given)
    assert (ended.curve, result.held_nll) == (result.curve[:2], end["held_nll"])
    assert result.correction is None
    assert load_result(save_result(result, tmp_path)) == result
    gated = run(replace(spec, method="cpl", evaluate_every=0), given)
    assert (gated.curve, len(result.curve)) == ([], 4)
    # Over four seeds the gate left 0.4 to 7 % of the loss that plain training gave the past.
    assert gated.past_nll is not None
    assert gated.past_nll < 0.5 * result.past_nll


def test_the_runner_does_a_free_form_run(spec: RunSpec, tmp_path: Path) -> None:
    short = replace(spec, epochs=1, external=("harbours",), external_limit=4)
    assert runner.execute(short, tmp_path) == "done"
    # What was kept by the model's own answers is now to be learned by the file's, of which it says none.
    other = replace(spec, task=spec.anchor_task, anchor_task=spec.task, num_new=9)
    with pytest.raises(ValueError, match="num_new is 9, but only 8 rows were initially wrong"):
        runner.execute(other, tmp_path)


def test_what_makes_no_sense_is_refused(spec: RunSpec, given: Comparison, tmp_path: Path) -> None:
    for changes, message in (
        ({"anchor_task": ""}, "expected an anchor_task besides .* got none"),
        ({"anchor_task": spec.task}, "expected an anchor_task besides"),
        ({"wrong_anchors": 1}, "wrong_anchors must be 0, got 1"),
        ({"keep": "general", "interface": "cloze"}, "need the interface freeform"),
        ({"stop_loss": 1.0, "evaluate_every": 0}, "needs an evaluation every epoch, got evaluate_every=0"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(spec, **changes)
    with pytest.raises(ValueError, match="the tasks of a sequence are multiple choice"):
        SequenceSpec(model="m", tasks=("a",), interface="freeform", method="sft", seed=0, num_anchors=0, num_probes=0)
    with pytest.raises(ValueError, match=r"keep\.jsonl is free text; expected the interface freeform"):
        split_task(given.base, spec.anchor_task, "cloze")
    with pytest.raises(ValueError, match="external tasks are multiple choice"):
        external_task(given.base, spec.anchor_task, spec)
    with pytest.raises(ValueError, match=r"expected the split of anchor_task .*keep\.jsonl"):
        set_up(spec, given.base, split_task(given.base, spec.task, "freeform"), tmp_path)
    closed = replace(spec, interface="cloze", diagnose=("permuted",), epochs=1)
    with pytest.raises(ValueError, match="permuting options requires the letter interface"):
        run(closed, given)
    with pytest.raises(TypeError, match="multiple choice"):
        repeated(given.base.model, given.past.interface, external_task(given.base, spec.task, spec).examples)


def test_a_curve_is_read_where_it_reaches_a_level() -> None:
    assert crossing([(1.0, 0.5), (0.5, 0.7)], 1.5) == 0.5  # it began below the level
    with pytest.raises(ValueError, match=r"a curve that falls to 0\.1, got one from 1\.0 to 0\.5"):
        crossing([(1.0, 0.5), (0.5, 0.7)], 0.1)


def test_short_of_memory_activations_are_computed_twice_with_the_same_numbers(
    spec: RunSpec, given: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(spec, given)
    assert not begun(spec, given).settings.gradient_checkpointing
    monkeypatch.setattr("cplus.lab.runs.free_bytes", lambda device: 0)
    assert begun(spec, given).settings.gradient_checkpointing
    assert run(spec, given).curve == whole.curve


def test_a_repair_of_free_text_keeps_the_new_loss_or_says_why_not(
    spec: RunSpec, given: Comparison, tmp_path: Path
) -> None:
    given = replace(given, probes=given.past.examples[:3])
    plain, repaired = run(replace(spec, epochs=6), given), run(replace(spec, epochs=6, method="sft-repair"), given)
    assert plain.new_nll is not None and repaired.new_nll is not None  # noqa: PT018
    assert plain.past_nll is not None and repaired.past_nll is not None  # noqa: PT018
    still = run(replace(spec, lr=0.0, epochs=1), given)
    assert still.new_nll is not None
    limit = plain.new_nll + 0.05 * (still.new_nll - plain.new_nll)
    assert plain.new_nll < repaired.new_nll <= limit * (1 + 1e-6)
    assert repaired.past_nll < plain.past_nll
    assert repaired.curve[-1]["held_nll"] == plain.curve[-1]["held_nll"]  # the curve ends before the repair
    assert 0 < repaired.diagnostics["seconds_after_training"] < repaired.seconds
    assert "seconds_after_training" not in plain.diagnostics
    assert plain.repair is None
    assert repaired.repair is not None
    assert 0 < repaired.repair["undone"] < repaired.repair["moved"]
    refused = load_result(save_result(run(replace(spec, lr=0.0, method="sft-repair"), given), tmp_path))
    assert refused.repair == {"refused": "base and tuned model have the same weights, so there is nothing to undo"}


def test_rows_written_from_nothing_take_the_place_of_anchors_or_stand_beside_them(
    spec: RunSpec, given: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, int, int]] = []

    def written(base: object, interface: object, anchors: Any, settings: Any, **_: object) -> Any:
        asked.append((settings.ability, len(anchors), settings.num_probes))
        rows = [conversation(f"{settings.ability} {i}", "yes") for i in range(settings.num_probes)]
        return SimpleNamespace(examples=tuple(rows), manifest={"yield": 0.5})

    monkeypatch.setattr(runs, "cached_bank", written)
    kept = split_task(given.base, spec.anchor_task, "freeform", kept=True)
    learned = split_task(given.base, spec.task, "freeform")
    own = replace(spec, method="cplus", num_probes=6)
    none = set_up(replace(own, keep="general"), given.base, learned, tmp_path, kept=kept)
    assert asked == [("general", 0, 8)]  # two anchors and six probes, and nothing from given rows
    assert [e.id for e in none.anchors] == ["general 0", "general 1"]
    assert len(none.probes) == 6
    both = set_up(replace(own, keep="both"), given.base, learned, tmp_path, kept=kept)
    assert asked[1:] == [(None, 2, 3), ("general", 0, 5)]
    assert [len(both.anchors), len(both.probes)] == [4, 6]
    assert both.anchors[:2] == given.anchors


def chat_run(way: str, seed: int, curve: list[tuple[float, float]], rate: float = 1.0, **own: Any) -> RunResult:
    """A run of 100 FLOPs an epoch whose curve has these losses of held-out rows and divergences."""
    spec = WAYS[way].run(SCALES["desk-real"], seed, rate, **own)
    points = [{"epoch": float(i), "held_nll": held, "divergence": far} for i, (held, far) in enumerate(curve)]
    return RunResult(
        spec=spec, retention=50.0, retention_uncovered=50.0, acquisition=90.0, external={},
        counts={"updates": 8, "probes": spec.num_probes}, extra_bytes=0, curve=points, seconds=1.0, past_nll=0.5,
        cost={"training_flops": 8e13 * (len(curve) - 1), "preservation_flops": 2e13 * (len(curve) - 1)},
        once={"before_flops": 1e12, "writing_flops": 2e12} if spec.num_probes else {},
    )  # fmt: skip


LADDER = (2.0, 1.0, 4.0)
WAYS = {
    "SFT": replace(chat.WAYS["SFT"], best=1.0),
    chat.OURS: replace(chat.WAYS[chat.OURS], best=1.0, rates=LADDER),
    "CPLUS": replace(chat.WAYS["CPLUS"], best=1.0),
    "self-replay": replace(chat.WAYS["self-replay"], best=None),
}


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[RunResult]:
    """A study with a level of 2 in which three ways report on three seeds; CPLUS is best at its ladder's end."""
    monkeypatch.setattr(chat, "WAYS", WAYS)
    monkeypatch.setattr(chat, "LEVEL", 2.0)
    monkeypatch.setattr(chat, "FIRST_LEVEL", 2.0)
    lost = {1.0: 0.3, 2.0: 0.2, 0.5: 0.4, 4.0: 0.5}
    found = [chat_run("SFT", 100, [(3.0, 0.0), (1.9, lost[rate])], rate, stop=None) for rate in (1.0, 2.0, 0.5)]
    found += [chat_run(chat.OURS, 100, [(3.0, 0.0), (2.0, lost[rate])], rate, stop=2.0) for rate in LADDER]
    found += [chat_run("self-replay", 100, [(3.0, 0.0), (2.5, 0.1)], rate, stop=2.0) for rate in (2.0, 1.0)]
    found += [chat_run("CPLUS", 100, [(3.0, 0.0), (2.0, lost[rate])], rate, stop=2.0) for rate in (2.0, 1.0)]
    for seed in (101, 102, 103):
        shift = seed / 1000
        found.append(chat_run("SFT", seed, [(3.0, 0.0), (2.5, 0.2), (1.5, 0.4 + shift)], stop=2.0))
        found.append(chat_run(chat.OURS, seed, [(3.0, 0.0), (2.0, 0.05 + shift / 10)], stop=2.0))
        found.append(chat_run("CPLUS", seed, [(3.0, 0.0), (2.0, 0.2)], stop=2.0))
    return found


def test_the_chat_study_compares_at_the_level_and_says_where_a_ladder_ends_or_a_run_does_not_get_there(
    declared: list[RunResult], tmp_path: Path
) -> None:
    folder = tmp_path / "desk-real"
    for result in declared:
        runner.save(result, folder)
    collected = collect(folder)
    assert collected.unknown_records == 0
    summary = collected.studies["chat"].summary
    rows = {(row.at["way"], row.at["lr"], row.at["seeds"]): row for row in summary.rows}
    lr = SCALES["desk-real"].base.lr
    plain, ours = rows["SFT", lr, "reports"].figures, rows[chat.OURS, lr, "reports"].figures
    assert plain["divergence"].mean == pytest.approx(0.2 + (0.2 + 0.102) / 2)  # halfway from 2.5 to 1.5
    assert plain["epochs"].mean == pytest.approx(1.5)
    assert (plain["recurring TFLOP"].mean, plain["once TFLOP"].mean) == pytest.approx((150, 0))
    assert (ours["recurring TFLOP"].mean, ours["once TFLOP"].mean) == pytest.approx((100, 3))
    remarks = {key: row.at["remark"] for key, row in rows.items() if row.at["remark"]}
    assert remarks == {
        ("CPLUS", 2 * lr, "chooses"): "best at its ladder's end",
        ("self-replay", 2 * lr, "chooses"): "does not reach the level",
        ("self-replay", lr, "chooses"): "does not reach the level",
        ("SFT", 2 * lr, "chooses"): "best at its ladder's end",
    }
    assert "divergence" not in rows["self-replay", lr, "chooses"].figures
    verdicts = {claim.says: claim for claim in summary.claims}
    assert verdicts[f"{chat.OURS} moves the model at most 0.4 times as far as SFT"].verdict == "holds"
    assert verdicts[f"{chat.OURS} costs at most 1.6 times as much as SFT"].verdict == "holds"
    ahead = verdicts[f"{chat.OURS} moves the model less than CPLUS at its best rate"]
    assert (ahead.verdict, ahead.margin and round(ahead.margin.mean, 4)) == ("holds", 0.1398)
    assert ahead.interval is not None
    assert "2.00" in summary.answer and "SFT 0.351 ± 0.000 for 150.0 ± 0.0 TFLOP" in summary.answer  # noqa: PT018
    picture, paths = draw(fig_chat, collected, tmp_path)
    assert picture.caption.endswith("Means and standard errors, n = 3 seeds.")
    assert {path.suffix for path in paths} == {".svg", ".png"}
    table = tab_chat(collected)
    assert [row[0] for row in table.rows[:3]] == [chat.OURS, "CPLUS", "SFT"]
    assert [row[-1] for row in table.rows[-2:]] == ["does not reach the level"] * 2
    lines = comparison_lines(collected)
    assert [line.measured for line in lines][1] == "150.000 ± 0.000 / 103.000 ± 0.000 / 103.000 ± 0.000"


def test_the_chat_study_is_repeated_on_other_seeds_and_rows(
    declared: list[RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    scale, study = SCALES["desk-real"], STUDIES["chat"]
    same = lab.repeated(study, scale, "201, 202", new=None, past=None)
    assert {(spec.method, spec.seed, spec.stop_loss) for spec in same} == {
        (name, seed, 2.0) for name in ("sft", "divergence", "cplus") for seed in (201, 202)
    }
    other = lab.repeated(study, scale, "201", new="mine.jsonl", past="asked.jsonl")
    assert {(spec.task, spec.anchor_task, spec.stop_loss) for spec in other} == {("mine.jsonl", "asked.jsonl", None)}
    runs = [
        chat_run("SFT", seed, [(3.0, 0.0), (low, 0.3)], stop=None, task="m.jsonl") for seed, low in ((1, 1.0), (2, 1.2))
    ]
    assert "is 1.30, KL" in study.summary(runs).answer  # SFT's lowest, where every seed reaches it, plus a tenth
    for name, seeds, message in (
        ("chat", "100,201", "seed 100 chose the level and the rates, so it cannot report"),
        ("chat", "", "--seeds must be whole numbers like 201,202, got ''"),
        ("facts", "201", "facts at scale desk-real has no runs to repeat on other seeds; expected chat"),
    ):
        with pytest.raises(ValueError, match=message):
            lab.repeated(STUDIES[name], scale, seeds, new=None, past=None)


def test_what_the_chat_study_chose_is_what_its_records_say() -> None:
    results = collect(Path(__file__).parent.parent / "results" / "desk-real").studies["chat"].results
    plain = [run for run in results if run.spec.method == "sft" and run.spec.seed == chat.SELECTION]
    lowest = {run.spec.lr: min(point["held_nll"] for point in run.curve) for run in plain}
    own = chat.WAYS["SFT"].best * SCALES["desk-real"].base.lr
    assert round(lowest[own] + chat.ABOVE, 2) == chat.LEVEL
    assert round(min(lowest.values()) + chat.ABOVE, 2) == chat.FIRST_LEVEL
    found = {name: rate / SCALES["desk-real"].base.lr for name, (rate, _) in chat.chosen(results, chat.LEVEL).items()}
    assert {name: pytest.approx(rate) for name, rate in found.items() if chat.WAYS[name].best} == {
        name: way.best for name, way in chat.WAYS.items() if way.best
    }
