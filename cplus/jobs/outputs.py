"""A job's answers before and after training, and what it writes: model, card, receipt and, last, the record."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cplus import models
from cplus.base import files
from cplus.base.environment import versions
from cplus.data import examples, interfaces
from cplus.data.examples import Example, Prediction, fingerprint
from cplus.data.interfaces import Interface
from cplus.distributed import processes
from cplus.evaluation.abilities import ABILITIES, STYLE, STYLE_LIMIT, THINKING, chosen, requests
from cplus.evaluation.changes import KINDS
from cplus.evaluation.judges import judge
from cplus.evaluation.task import rounded, to_bfloat16, to_q8_0
from cplus.jobs.folder import Folder
from cplus.jobs.progress import say
from cplus.jobs.settings import AdaptConfig
from cplus.models import Loaded
from cplus.models.decoding import LocalEngine
from cplus.models.loading import without_bars
from cplus.models.scoring import Score, bare, log_likelihoods
from cplus.models.served import Answer, Served
from cplus.probes.settings import input_key
from cplus.receipts import page
from cplus.receipts.contents import (
    Beside,
    Divergence,
    Receipt,
    RowComparison,
    RowSet,
)
from cplus.receipts.verdict import headline, sentences
from cplus.training.measure import (
    BaseRow,
    GroupAnswers,
    base_rows,
    divergence,
    divergences,
    evaluate,
    evaluate_texts,
)
from cplus.training.rows import Group

# A job's answers before and after training; the base model's are stored, so that a resumed job can read them.


DECODED = 64
"""New rows in free text that are answered after training where nobody judges them; the others have their loss."""


def answer(model: nn.Module, group: Group, config: AdaptConfig, when: str) -> GroupAnswers:
    """A group's answers; the processes of a job answer a share of the rows each, and all of them get all answers.

    Answers that nobody judges are not asked for where they are known: new rows before training, the model's own texts.
    """
    what, judged = f"{when}: {group.name}", judge(config.judge)
    unjudged = not group.closed and judged is None
    learned = group.part in ("acquisition", "validation")

    def spread(own: Group, answered: Callable[[Group], GroupAnswers]) -> GroupAnswers:
        def some(places: Sequence[int]) -> list[tuple[Prediction | None, Score | None]]:
            known = tuple(own.known[i] for i in places if own.known)
            found = answered(replace(own, examples=tuple(own.examples[i] for i in places), known=known))
            return list(zip_longest(found.predictions, found.scores))

        rows = processes.spread(range(len(own.examples)), some)
        return GroupAnswers(
            predictions=tuple(row for row, _ in rows if row is not None),
            scores=tuple(score for _, score in rows if score is not None),
        )

    def scored(own: Group) -> GroupAnswers:
        return GroupAnswers(predictions=(), scores=tuple(log_likelihoods(model, own.encoded(), what=what)))

    def told(own: Group) -> GroupAnswers:
        # The base model's own answers were written with the limit of their ability.
        limit = own.max_new_tokens if own.by_base else None
        limit = limit or min(config.max_new_tokens, own.max_new_tokens or config.max_new_tokens)
        return evaluate(model, own, judge=judged, max_new_tokens=limit, what=what)

    if group.known and when == "before":
        found = GroupAnswers(predictions=group.known) if group.closed else spread(group, scored)
        return replace(found, predictions=group.known)
    if group.texts or (unjudged and learned and when == "before"):
        return spread(group, scored)
    if unjudged and group.by_base and when == "before":
        return spread(group, lambda own: evaluate_texts(model, own, what=what))
    few = group.drawn(DECODED, config.seed) if unjudged and learned else group
    found = spread(few, told)
    return found if few is group else replace(spread(group, scored), predictions=found.predictions)


def base_answers(path: Path, base: Loaded, groups: Sequence[Group], config: AdaptConfig) -> dict[str, GroupAnswers]:
    """The base model's answers to every group, from the file or computed now and written to it."""
    identity = {group.name: fingerprint(group.examples) for group in groups} | {"model": base.fingerprint}

    def measure() -> dict[str, Any]:
        found = {group.name: answer(base.model, group, config, "before") for group in groups}
        return {
            "identity": identity,
            "answers": {
                name: {
                    "predictions": [dataclasses.asdict(prediction) for prediction in own.predictions],
                    "scores": [[score.total, score.num_tokens] for score in own.scores],
                }
                for name, own in found.items()
            },
        }

    stored = measured_once(path, measure)
    if stored["identity"] != identity:
        changed = [name for name in identity if stored["identity"].get(name) != identity[name]]
        raise ValueError(f"the {' and '.join(changed)} changed since the job began; start a new job")
    return {
        name: GroupAnswers(
            predictions=tuple(examples.prediction_from_row(own) for own in row["predictions"]),
            scores=tuple(Score(total, count) for total, count in row["scores"]),
        )
        for name, row in stored["answers"].items()
    }


def measured_once(path: Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What an earlier process measured and sealed in the file, else what all processes measure now."""

    def read() -> dict[str, Any] | None:
        try:
            return files.read_sealed(path) if path.is_file() else None
        except ValueError as error:
            say(f"{error}; so it is measured again")
            return None

    if (stored := processes.shared(read)) is not None:
        return stored
    found = measure()
    if processes.first():
        files.write_json(path, files.sealed(found))
    return found


# Abilities, and how far a model has moved, against a base model that is in memory only for as long as this takes.


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A base model's answers by ability, and its expectations at held-out past rows with the scale of rounding.

    `style` are its expectations at its own answers, `notes` say which abilities it could not be asked for.
    """

    interface: Interface | None
    answers: Mapping[str, Sequence[Answer]]
    style: Sequence[BaseRow] = ()
    rows: Sequence[BaseRow] = ()
    bfloat16: float = 0.0
    q8_0: float = 0.0
    notes: Sequence[str] = ()


def reference(
    base: Loaded | Served,
    config: AdaptConfig,
    held: Group | None,
    names: Iterable[str] | None = None,
) -> Reference:
    """What a base model answers, by ability, and expects; its answers are cached by the fingerprint of its weights."""
    answers, notes, style = {}, [], []
    problem = why_unmeasured(config, base)
    if names is not None and chosen(config.abilities) and problem is not None:
        notes.append(f"Abilities were not measured: {problem}.")
    for name in (config.measured if names is None else names) if problem is None else ():
        if (problem := why_unmeasured(config, base, name)) is None:
            answers[name] = asked(base, config, name, what="base model", cached=True)
        else:
            notes.append(f"The ability {name} was not measured: {problem}.")
    if isinstance(base, Served):
        return Reference(interface=None, answers=answers, notes=notes)
    bound = ability_interface(base.tokenizer, config)
    with models.computing(config.compute_dtype, base.device):
        if bound is not None and STYLE in answers:
            own = zip(requests(STYLE), answers[STYLE], strict=True)
            rows = [replace(request.example, response=said.text or "-", cut=not said.ended) for request, said in own]
            style = base_rows(base.model, [bound.encode(row) for row in rows])
        if held is None or held.closed or held.part != "retention":
            return Reference(interface=bound, answers=answers, style=style, notes=notes)
        known = base_rows(base.model, held.encoded())
        scale = []
        for store in (to_bfloat16, to_q8_0):
            with rounded(base.model, store):
                scale.append(divergence(base.model, known))
    return Reference(
        interface=bound, answers=answers, style=style, rows=known, bfloat16=scale[0], q8_0=scale[1], notes=notes
    )


def ability_interface(tokenizer: Any, config: AdaptConfig, name: str = "") -> Interface | None:
    """How abilities are asked for: through the chat template; without one they are not."""
    if config.plain or not getattr(tokenizer, "chat_template", None):
        return None
    return interfaces.build("freeform", tokenizer, chat=True, thinking="keep" if name == THINKING else "off")


def why_unmeasured(config: AdaptConfig, model: Loaded | Served, name: str = "") -> str | None:
    """Why a model cannot be asked for an ability, as the rest of a sentence."""
    if not name and not chosen(config.abilities):
        return "none was asked for"
    if isinstance(model, Served):
        return "it needs the weights of both models" if name == STYLE else None
    if config.plain:
        return "plain prompts were chosen"
    if (bound := ability_interface(model.tokenizer, config, name)) is None:
        return "the model has no chat template"
    if not name:
        return None
    prompts = [bound.prompt(request.example) for request in requests(name)]
    quiet = ability_interface(model.tokenizer, config)
    if name == THINKING and quiet is not None and prompts[0] == quiet.prompt(requests(name)[0].example):
        return "the chat template has no thoughts"
    if max(map(len, prompts)) + ABILITIES[name].max_new_tokens > model.window:
        return f"its requests are longer than the model's window of {model.window:,} tokens"
    return None


def asked(
    model: Loaded | Served, config: AdaptConfig, name: str, *, what: str, cached: bool, other: Interface | None = None
) -> Sequence[Answer]:
    """A model's answers to the requests of an ability, from the cache where its weights, unchanged, were asked before.

    `other` is the interface of a base model, for one that was saved without a chat template.
    """
    limit = ABILITIES[name].max_new_tokens
    if isinstance(model, Served):
        rows = [request.example for request in requests(name)]
        return model.answers(rows, max_new_tokens=limit, thinking=name == THINKING, what=f"{what}: {name}")
    bound = ability_interface(model.tokenizer, config, name) or other
    assert bound is not None
    prompts = [bound.prompt(request.example) for request in requests(name)]

    def answered(own: Sequence[tuple[int, ...]]) -> list[Answer]:
        said = LocalEngine(bare(model.model), bound.tokenizer).greedy(
            own, max_new_tokens=limit, stop=bound.answer_stop, word_first=False, what=f"{what}: {name}"
        )
        return [Answer(row.text.strip(), row.end != "limit") for row in said]

    def row() -> dict[str, Any]:
        with models.computing(config.compute_dtype, model.device):
            return {"model": model.fingerprint, "answers": processes.spread(prompts, answered)}

    key = files.fingerprint([model.fingerprint, config.compute_dtype, versions(), limit, prompts])
    stored = measured_once(files.cache_folder() / "answers" / f"{key[:32]}.json", row) if cached else row()
    return [Answer(*own) for own in stored["answers"]]


def measured(
    known: Reference,
    after: Loaded | Served,
    config: AdaptConfig,
    given: Iterable[Example],
    *,
    paced: Callable[[Iterable[str]], Iterable[str]] = iter,
    cached: bool = False,
) -> tuple[tuple[RowSet, ...], Divergence | None]:
    """The requests of every ability as base and model answer them, and how far the model has moved.

    Requests among the rows `given`, which are trained on or evidence, measure nothing and are left out.
    """
    seen = {input_key(example, options=False) for example in given}
    sets = []
    for name in paced(known.answers):
        before = known.answers[name]
        now = asked(after, config, name, what="after", cached=cached, other=known.interface)
        answered = list(zip(requests(name), before, now, strict=True))
        if name == STYLE and not isinstance(after, Served):
            with models.computing(config.compute_dtype, after.device):
                right = [(True, moved <= STYLE_LIMIT) for moved in divergences(after.model, known.style)]
        else:
            right = [(request.right(old.text), request.right(new.text)) for request, old, new in answered]
        rows = tuple(
            RowComparison(
                id=request.id,
                kind=KINDS[outcome],
                input=request.request,
                gold=request.answer,
                before=old.text,
                after=new.text,
                confidence_before=0.0,
                confidence_after=0.0,
                ended_before=old.ended,
                ended_after=new.ended,
            )
            for (request, old, new), outcome in zip(answered, right, strict=True)
            if input_key(request.example, options=False) not in seen
        )
        sets.append(RowSet(name=name, kind="ability", interface="freeform", rows=rows, judge="rules"))
    if isinstance(after, Served) or not known.rows:
        return tuple(sets), None
    with models.computing(config.compute_dtype, after.device):
        moved = divergence(after.model, known.rows)
    return tuple(sets), Divergence(rows=len(known.rows), after=moved, bfloat16=known.bfloat16, q8_0=known.q8_0)


# The outputs of a finished job: the model, its card, the receipt and, last of all, the record.


def write_model(folder: Folder, model: Any, tokenizer: Any, dtype: str) -> None:
    """Safetensors and tokenizer, for plain transformers; the model in memory keeps its precision."""
    written = model if dtype == "float32" else copy.deepcopy(model).to(getattr(torch, dtype))
    with files.replacing_folder(folder.model) as part, without_bars():
        written.save_pretrained(part)
        tokenizer.save_pretrained(part)


def write_record(folder: Folder, receipt: Receipt, job: Mapping[str, Any], template: str = "card.md") -> dict[str, Any]:
    """Write card, page and record, and return the record: its presence marks the job as finished."""
    record = page.to_json(receipt, job)
    files.write_text(folder.card, card(record, template))
    return page.write_record(record, folder.root)


def rewritten(folder: Folder, beside: Beside) -> dict[str, Any]:
    """The record of a finished job with plain fine-tuning beside it, written with its page and its card."""
    record = files.read_sealed(folder.record)
    job = {name: value for name, value in record.items() if name not in page.PARTS}
    return write_record(folder, replace(page.from_json(record), beside=beside), job)


def scores_of(group: Group, few: Group, before: Mapping[str, GroupAnswers]) -> list[Score]:
    """The base model's scores of a few rows of a group."""
    scores = dict(zip((example.id for example in group.examples), before[group.name].scores, strict=True))
    return [scores[example.id] for example in few.examples]


def card(record: Mapping[str, Any], template: str = "card.md") -> str:
    """The model card, from the record alone."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("cplus.jobs"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    figures, lora = record["figures"], record["settings"].get("lora")
    shown = {
        "headline": headline(figures),
        "sentences": sentences(figures),
        "apart": lora is not None and not lora["merge"],
    }
    return environment.get_template(template).render({**record, **shown})
