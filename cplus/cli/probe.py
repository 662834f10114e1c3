"""`cplus probe`: let a model write its own probes, seal them in a bank, and report on what is in it."""

from __future__ import annotations

import difflib
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from cplus import models
from cplus.base.files import cache_folder, write_text
from cplus.base.terminal import clean, console, output, print_json, print_table
from cplus.cli import options as names
from cplus.cli.options import Command, Group, Json, Model, given, with_settings
from cplus.data import interfaces
from cplus.data.examples import Example
from cplus.data.interfaces import Interface
from cplus.data.tasks import Task, cached_split, draw_anchors, load_task, stack
from cplus.evaluation.abilities import MIN_YIELD
from cplus.jobs.settings import sentences, settings
from cplus.probes.bank import Bank
from cplus.probes.settings import TOPICS, ProbeSettings
from cplus.receipts.page import render_audit

if TYPE_CHECKING:
    from cplus.models import Loaded


class Probing(Group):
    """`probe MODEL` is short for `probe write MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments."""
        known = args and (args[0] in (*self.commands, "--help") or self._misspelt(args[0]))
        return super().parse_args(ctx, args if known or not args else ["write", *args])

    def _misspelt(self, word: str) -> bool:
        return bool(difflib.get_close_matches(word, self.commands, cutoff=0.75)) and not Path(word).exists()


probe = typer.Typer(
    cls=Probing,
    no_args_is_help=True,
    help="Let a model write probes into a sealed bank ('cplus probe MODEL' is short for write), or audit a bank.",
)

_SETTINGS = ("shots", "temperature", "topics", "seed", "plain", "data_dir", "device")
_BANK = ("label_balanced", "max_new_tokens", "min_yield")
"""Settings of a bank that a job does not have."""


@probe.command(cls=Command)
@with_settings(("interface", "num_probes"), (*_SETTINGS, *_BANK))
def write(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder of the bank.")] = Path("bank"),
    anchors: Annotated[
        str,
        typer.Option(
            help="File of anchors, or the number of anchors to draw from the task.", autocompletion=names.tasks
        ),
    ] = "8",
    task: Annotated[
        str | None, typer.Option(help="Task to draw anchors from: a name or a file.", autocompletion=names.tasks)
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="No anchors: the model writes everything itself: general, json, style, thinking or tools."),
    ] = None,
    vllm: Annotated[str | None, typer.Option(help="Address of a vLLM server to sample on.")] = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Build a sealed probe bank, or resume an interrupted one."""
    chosen = given(options, ("interface", "num_probes", *_SETTINGS, *_BANK))
    bank_values = {name: chosen.pop(name) for name in _BANK if name in chosen}
    config = settings({"num_probes": 512, **chosen, "model": model, "split": task or anchors})
    same = {name: getattr(config, name) for name in ("num_probes", "shots", "temperature", "seed")}
    values = {**same, "topics": TOPICS if config.topics or keep else (), "ability": keep, **bank_values}
    try:
        asked = TypeAdapter(ProbeSettings).validate_python(values)
    except ValidationError as error:
        raise ValueError(sentences(error, values)) from error
    names.check({"model": model, "task": task, "anchors": None if anchors.isdecimal() else anchors})
    rows = task if anchors.isdecimal() else anchors
    if rows is None and not keep:
        raise ValueError(f"expected a task to draw {anchors} anchors from; give --task, or a file with --anchors")
    source = None if keep or rows is None else load_task(rows, config.data_dir)

    from cplus.jobs.progress import bank_view
    from cplus.models.decoding import LocalEngine, ServerEngine
    from cplus.probes.build import build

    base = models.load(model, device=config.device)
    shown: tuple[Example, ...] = ()
    if source is None:
        asked = replace(asked, min_yield=max(asked.min_yield, MIN_YIELD))
        chat = bool(getattr(base.tokenizer, "chat_template", None)) and not config.plain
        thinking = "keep" if keep == "thinking" else "off"
        bound = interfaces.build(config.interface or "freeform", base.tokenizer, chat=chat, thinking=thinking)
    else:
        bound = interfaces.build(
            config.interface or source.interface, base.tokenizer, wording=source.wording, chat=not config.plain
        )
        shown = _anchors(anchors, source, base, bound, seed=asked.seed)
    engine = ServerEngine(vllm) if vllm else LocalEngine(base.model, base.tokenizer)
    begun = time.perf_counter()
    with bank_view(asked.num_probes) as watch:
        bank = build(out, base, bound, shown, asked, engine=engine, watch=watch)
    seconds, manifest = time.perf_counter() - begun, bank.manifest
    if json:
        print_json({"bank": str(out), "probes": len(bank.probes), "seconds": seconds, "manifest": dict(manifest)})
        return
    counts = manifest["counts"]
    rejected = ", ".join(f"{reason} {n}" for reason, n in sorted(counts["rejected"].items(), key=lambda item: -item[1]))
    output.print(
        f"{out}: {len(bank.probes)} probes of {manifest['model']['name']} by {manifest['interface']}, "
        f"sealed {manifest['probes_sha256'][:12]}; yield {manifest['yield']:.1%} of {counts['requests']} requests"
        + (f" (rejected: {rejected})" if rejected else "")
        + f"; {seconds:.0f} s",
        soft_wrap=True,
    )


def _anchors(anchors: str, source: Task, base: Loaded, interface: Interface, *, seed: int) -> tuple[Example, ...]:
    """All rows of a file, or this number of rows that the model answers correctly; of free text, any rows."""
    from cplus.models.scoring import predict

    if not anchors.isdecimal():
        return source.examples
    examples, count = source.examples, int(anchors)
    if interface.name == "freeform":
        if count > len(examples):
            raise ValueError(f"asked for {count} anchors, but the task has {len(examples)} rows")
        return tuple(random.Random(seed).sample(examples, len(examples))[:count])
    split = cached_split(
        cache_folder() / "splits",
        examples,
        lambda: predict(base.model, interface, examples, what="what the model knows"),
        model_fingerprint=base.fingerprint,
        interface=interface.name,
        stack=stack(device=base.device.type),
    )
    return draw_anchors(split, count, seed)


@probe.command(cls=Command)
def audit(
    banks: Annotated[list[Path], typer.Argument(metavar="BANK...", help="Folders of sealed banks.")],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="File or task to search for copies, such as the evaluation set; repeatable.",
            autocompletion=names.tasks,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write the audit as one HTML page.")] = None,
    json: Json = False,
) -> None:
    """Check a bank's seal and report copies, leaks, confidence, labels, yield; several side by side.

    The anchors are read from `anchors.jsonl` beside the bank, where 'cplus adapt' writes them.
    """
    names.check({"task": against})
    if len(banks) > 1:
        _side_by_side(banks, against or (), html=html, json=json)
        return

    from cplus.probes import audit as figures

    [folder] = banks
    bank, beside = Bank.load(folder), folder.resolve().parent / "anchors.jsonl"
    sources = {name: load_task(name).examples for name in against or ()}
    if beside.is_file() and not any(figures.sealed_anchors(bank, rows) for rows in sources.values()):
        rows = load_task(str(beside)).examples
        sources |= {beside.name: rows} if figures.sealed_anchors(bank, rows) else {}
    found = figures.audit(bank, sources)
    if html is not None:
        write_text(html, render_audit(found, name=folder.name))
        console.print(f"wrote {html}")
    print_json(found) if json else _show(found)


def _side_by_side(banks: Sequence[Path], against: Sequence[str], *, html: Path | None, json: bool) -> None:
    """Several banks, one column each, and all of them together, as the paper reports its three.

    Paper: App. C.2.
    """
    from cplus.probes.audit import short_audit, together

    if html is not None:
        raise ValueError(f"a page shows one bank, got {len(banks)}; leave --html out, or audit them one by one")
    rows = [example for name in against for example in load_task(name).examples]
    found = [short_audit(Bank.load(bank), rows) for bank in banks]
    whole = together(found)
    if json:
        shown = [{"folder": str(bank), **own} for bank, own in zip(banks, found, strict=True)]
        print_json({"banks": shown, "together": whole, "against": list(against)})
        return
    columns = [*(together([own]) for own in found), whole]
    lines = []
    for key, words in TOGETHER.items():
        values = (own[key] for own in columns)
        lines.append((words, *(f"{value:,}" if isinstance(value, int) else f"{value:.3f}" for value in values)))
    print_table(("", *(clean(bank.name) for bank in banks), "together"), lines)


TOGETHER = {
    "probes": "probes",
    "unique": "unique inputs",
    "mean": "confidence, mean",
    "median": "confidence, median",
    "p10": "confidence, p10",
    "exact": "exact copies",
    "near": "near copies",
}


def _show(found: dict[str, Any]) -> None:
    confidence, labels = found["confidence"], found["labels"]
    rejected = ", ".join(f"{reason} {share:.1%}" for reason, share in found["rejected_shares"].items())
    common = list(labels["shares"].items())[:6]
    shares = ", ".join(f"{clean(answer)[:40]} {share:.0%}" for answer, share in common)
    apart = "anchors not found" if labels["divergence"] is None else f"{labels['divergence']:.3f} bits from the anchors"
    lines = {
        "unique inputs": f"{found['unique']} of {found['probes']} ({found['distinct_share']:.1%})",
        "confidence": "mean {mean:.3f}, median {median:.3f}, p10 {p10:.3f}".format_map(confidence),
        "yield": f"{found['yield']:.1%} of {found['counts']['requests']} requests; rejected: {rejected or 'none'}",
        "answers": f"{labels['distinct']} different ({shares}); {apart}",
    }
    copies = "{exact} exact ({exact_share:.2%}), {near} near ({near_share:.2%})"
    lines |= {clean(name): copies.format_map(one) for name, one in found["against"].items()}
    for name, text in lines.items():
        output.print(f"{name:14} {text}", soft_wrap=True)
    for pair in found["nearest"][:5]:
        own, row = (clean(" ".join(pair[name].split()))[:110] for name in ("probe_text", "row_text"))
        output.print(f"{pair['jaccard']:.2f}  {own}\n      {row}", soft_wrap=True)
