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

from cplus import models
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
    assert (start["retention"], start["acquisition"]) == (100.0, 0.0)
    learned = split_task(given.base, spec.task, "freeform")[1].new
    for name, examples, others, count in (
        ("past_nll", given.past.examples, given.anchors, len(given.bases)),
        ("held_nll", learned, given.new.examples, 2),
    ):
        asked = [given.past.interface.encode(example) for example in examples if example not in others]
        scores = log_likelihoods(given.base.model, asked)
        expected = -sum(score.total for score in scores) / sum(score.num_tokens for score in scores)
        assert (len(asked), start[name]) == (count, pytest.approx(expected, rel=1e-5))
    assert end["new_nll"] < start["new_nll"]
    assert end["past_nll"] > start["past_nll"]
    assert start["divergence"] == 0.0 < result.curve[1]["divergence"] < end["divergence"] == result.divergence
    assert result.once["before_flops"] == result.once["after_flops"] == 0
    ended = run(replace(spec, stop_loss=result.curve[1]["new_nll"]), given)
    assert (ended.curve, ended.new_nll) == (result.curve[:2], result.curve[1]["new_nll"])
    final = {"retention": result.retention, "acquisition": result.acquisition}
    assert {**final, "past_nll": result.past_nll, "new_nll": result.new_nll}.items() <= end.items()
    assert result.correction is None
    assert load_result(save_result(result, tmp_path)) == result
    gated = run(replace(spec, method="cpl", evaluate_every=0), given)
    assert (gated.curve, len(result.curve)) == ([], 4)
    # Over four seeds the gate left 0.4 to 7 % of the loss that plain training gave the past.
    assert gated.past_nll is not None
    assert gated.past_nll < 0.5 * end["past_nll"]


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
    plain, repaired = (vars(run(replace(spec, epochs=6, method=own), given)) for own in ("sft", "sft-repair"))
    limit = plain["new_nll"] + 0.05 * (plain["curve"][0]["new_nll"] - plain["new_nll"])
    assert plain["new_nll"] < repaired["new_nll"] <= limit * (1 + 1e-6)
    assert repaired["past_nll"] < plain["past_nll"]
    assert repaired["curve"][-1]["new_nll"] == plain["curve"][-1]["new_nll"]  # the curve ends before the repair
    assert 0 < repaired["diagnostics"]["seconds_after_training"] < repaired["seconds"]
    assert "seconds_after_training" not in plain["diagnostics"]
    assert plain["repair"] is None
    assert 0 < repaired["repair"]["undone"] < repaired["repair"]["moved"]
    refused = load_result(save_result(run(replace(spec, lr=0.0, method="sft-repair"), given), tmp_path))
    assert refused.repair == {"refused": "base and tuned model have the same weights, so there is nothing to undo"}


def test_rows_written_from_nothing_take_the_place_of_anchors_or_stand_beside_them(
    spec: RunSpec, given: Comparison, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, int, int]] = []

    def written(base: object, interface: object, anchors: Any, settings: Any, **_: object) -> Any:
        asked.append((settings.ability, len(anchors), settings.num_probes))
        rows = [conversation(f"{settings.ability} {i}", "yes") for i in range(settings.num_probes)]
        return SimpleNamespace(examples=tuple(rows))

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


def chat_run(
    method: str, seed: int, curve: list[tuple[float, float]], end: tuple[float, float], **own: Any
) -> RunResult:
    spec = chat._run(SCALES["desk-real"], seed, method=method, **own)
    points = [{"epoch": float(i), "new_nll": new, "past_nll": past} for i, (new, past) in enumerate(curve)]
    return RunResult(
        spec=spec, retention=50.0, retention_uncovered=50.0, acquisition=90.0, external={},
        counts={"updates": 10 * (len(curve) - 1)}, cost={}, seconds=1.0, extra_bytes=0, curve=points,
        new_nll=end[0], past_nll=end[1],
    )  # fmt: skip


def test_the_chat_frontier_takes_each_neighbours_best_rate_and_leaves_out_who_did_not_learn(tmp_path: Path) -> None:
    lr = SCALES["desk-real"].base.lr
    found = []
    for seed in (5, 6, 7):
        shift = 0.001 * seed
        fast, slow = [(3.0, 0.5), (0.7, 1.5)], [(3.0, 0.5), (1.85, 0.7), (0.85, 0.9 + shift)]
        found += [chat_run("sft", seed, fast, fast[-1]), chat_run("sft", seed, slow, slow[-1], lr=lr / 2)]
        found += [chat_run("replay", seed, [(3.0, 0.5), (0.9, 0.5)], (0.9, 0.5))]  # it never reaches the level
        found += [chat_run("cplus", seed, [(3.0, 0.5), (0.85, 0.6)], (0.85, 0.6))]
        found += [chat_run("sft-repair", seed, [(3.0, 0.5), (0.6, 2.0)], (0.8, 0.8), stop_loss=0.68)]
        found[-1].diagnostics["seconds_after_training"] = 0.2
        found += [chat_run("sft", seed, [(3.0, 0.1), (0.85, 0.3)], (0.85, 0.3), anchor_task=chat.FORMAT)]
    folder = tmp_path / "desk-real"
    for result in found:
        runner.save(result, folder)
    collected = collect(folder)
    picture, paths = draw(fig_chat, collected, tmp_path)
    assert picture.caption.endswith("n = 3 seeds. Methods are compared where the new loss is 0.85.")
    assert {path.suffix for path in paths} == {".svg", ".png"}
    [style] = comparison_lines(collected)
    assert style.measured == "0.935 ± 0.000 / 0.100 ± 0.000 / not run / not run"
    named = [row[:2] for row in tab_chat(collected).rows]
    assert named[-2:] == [("style", "Replay"), ("format", "SFT")]  # Replay has no rise
    summary = STUDIES["chat"].summary(found)
    half = "CPLUS (anchors given) loses at most half of what"
    assert {
        f"style: {half} sft loses at its best rate": "holds",
        f"style: {half} replay loses at its best rate": "not run",
        "style: repair at least halves what sft loses at its best rate": "fails",
        "style: repair takes at most half of the training's time": "holds",
        f"format: {half} sft loses at its best rate": "not run",
    }.items() <= {claim.says: claim.verdict for claim in summary.claims}.items()
    rows = {(row.at["method"], row.at["lr"]): row.figures for row in summary.rows if row.at["past"] == "style"}
    for (method, rate, figure), mean in {
        ("sft", lr / 2, "rise of past loss"): 0.406,
        ("sft", lr / 2, "updates"): 20.0,
        ("sft", lr, "updates"): 10 * (3.0 - 0.85) / (3.0 - 0.7),
        ("sft-repair", lr, "updates"): 10.0,
        ("sft-repair", lr, "rise of past loss"): 0.3,
        ("sft-repair", lr, "share after training"): 0.25,
    }.items():
        assert rows[method, rate][figure].mean == pytest.approx(mean)
    assert chat.risen(chat_run("sft-repair", 5, [(3.0, 0.5), (0.6, 2.0)], (0.9, 0.8), stop_loss=0.68)) is None
    assert "rise of past loss" not in rows["replay", lr]
    for words in (
        "style: 0.406 ± 0.001 with sft, not run with replay",
        "at its best rate, 0.100 ± 0.000 with CPLUS (anchors given)",
        "format: 0.200 ± 0.000 with sft",
    ):
        assert words in summary.answer


@pytest.mark.parametrize(("ours", "verdict"), [(-0.07, "fails"), (-0.2, "holds")])
def test_where_a_neighbours_past_loss_falls_ours_must_fall_further(ours: float, verdict: str) -> None:
    found = []
    for seed, shift in zip((5, 6, 7), (0.0, 0.001, 0.002), strict=True):
        for method, rise in (("replay", -0.1), ("cplus", ours)):
            curve = [(3.0, 0.5), (0.85, 0.5 + rise + shift)]
            found.append(chat_run(method, seed, curve, curve[-1], anchor_task=chat.FORMAT))
    verdicts = {claim.says: claim.verdict for claim in STUDIES["chat"].summary(found).claims}
    half = "CPLUS (anchors given) loses at most half of what replay loses at its best rate"
    assert verdicts[f"format: {half}"] == verdict
