"""`cplus probe`: let a model write its own probes, and seal them in a bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cplus.cli import options
from cplus.cli.options import DataDir, Device, InterfaceName, Json, OptionalModel, Plain, setting

if TYPE_CHECKING:
    from cplus.data.examples import Example
    from cplus.data.interfaces import Interface
    from cplus.data.tasks import Task
    from cplus.models import Loaded
    from cplus.probes.bank import Bank
    from cplus.probes.writing import Block, Sampled


def probe(
    model: OptionalModel = None,
    out: Annotated[Path, typer.Option(help="Folder of the bank.")] = Path("bank"),
    anchors: Annotated[
        str, setting("anchors", help="File of anchors, or the number of anchors to draw from the task.")
    ] = "8",
    task: Annotated[
        str | None, typer.Option(help="Task to draw anchors from: a name or a file.", autocompletion=options.tasks)
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="No anchors: the model writes everything itself: general, json, style, thinking or tools."),
    ] = None,
    interface: InterfaceName = None,
    num_probes: Annotated[int, setting("num_probes", help="Number of probes in the bank (N).")] = 512,
    shots: Annotated[int, setting("shots")] = 2,
    temperature: Annotated[float, setting("temperature")] = 0.8,
    topics: Annotated[
        bool, typer.Option("--topics", help="Name one of 24 topics in each request for a probe.")
    ] = False,
    seed: Annotated[int, setting("seed", help="Random seed for drawing anchors and sampling probes.")] = 0,
    domain: Annotated[
        str | None, typer.Option(help="Keep only probes of a domain: of the toy world, or re:PATTERN.")
    ] = None,
    label_balanced: Annotated[
        bool, typer.Option("--label-balanced", help="The same number of probes for each letter.")
    ] = False,
    confidence_floor: Annotated[
        float, typer.Option(help="Drop probes that the model answers with less confidence.")
    ] = 0.0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per probe.")] = None,
    min_yield: Annotated[float, typer.Option(help="Stop if a smaller share of the requests succeeds.")] = 0.02,
    rows: Annotated[int, typer.Option(help="Number of requests sampled at a time.")] = 64,
    vllm: Annotated[str | None, typer.Option(help="Address of a vLLM server to sample on.")] = None,
    limit: Annotated[int | None, typer.Option(help="Draw anchors from the task's first rows only.")] = None,
    plain: Plain = False,
    data_dir: DataDir = None,
    device: Device = "auto",
    verify: Annotated[Path | None, typer.Option(help="Only check the seal of this bank.")] = None,
    json: Json = False,
) -> None:
    """Build a sealed probe bank, resume an interrupted one, or verify one."""
    options.check({"model": model, "task": task, "anchors": None if anchors.isdecimal() else anchors})

    import time

    from cplus.probes.bank import Bank

    if verify is not None:
        _report(Bank.load(verify), verify, json=json)
        return
    if model is None:
        raise ValueError("expected a model to probe, or --verify and a bank; see 'cplus probe --help'")

    from dataclasses import replace

    from cplus import models
    from cplus.data import interfaces
    from cplus.models.decoding import LocalEngine
    from cplus.probes.abilities import MIN_YIELD
    from cplus.probes.build import build
    from cplus.probes.server import ServerEngine
    from cplus.probes.settings import TOPICS, ProbeSettings

    settings = ProbeSettings(
        num_probes=num_probes,
        shots=shots,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        topics=TOPICS if topics else (),
        seed=seed,
        min_yield=min_yield,
        label_balanced=label_balanced,
        confidence_floor=confidence_floor,
        domain=domain,
    )
    source = None if keep else _source(anchors, task, domain, data_dir)
    base = models.load(model, device=device)
    if source is None:
        settings = replace(settings, ability=keep, topics=TOPICS, min_yield=max(min_yield, MIN_YIELD))
        chat = bool(getattr(base.tokenizer, "chat_template", None)) and not plain
        thinking = "keep" if keep == "thinking" else "off"
        bound = interfaces.build(interface or "freeform", base.tokenizer, chat=chat, thinking=thinking)
        shown: tuple[Example, ...] = ()
    else:
        bound = interfaces.build(interface or source.interface, base.tokenizer, wording=source.wording, chat=not plain)
        shown = _anchors(anchors, source, base, bound, seed=seed, limit=limit)
    engine = ServerEngine(vllm) if vllm else LocalEngine(base.model, base.tokenizer, rows=rows)
    begun = time.perf_counter()
    with _progress(num_probes) as watch:
        bank = build(out, base, bound, shown, settings, engine=engine, watch=watch)
    _report(bank, out, json=json, seconds=time.perf_counter() - begun)


def _source(anchors: str, task: str | None, domain: str | None, data_dir: Path | None) -> Task:
    """The source of the anchors: their own file, the task, or a domain of the toy world."""
    from cplus.data.tasks import load_task

    if not anchors.isdecimal():
        return load_task(anchors, data_dir)
    name = task or (domain if domain and not domain.startswith("re:") else None)
    if name is None:
        raise ValueError(f"expected a task to draw {anchors} anchors from; give --task, or a file with --anchors")
    return load_task(name, data_dir)


def _anchors(
    anchors: str, source: Task, base: Loaded, interface: Interface, *, seed: int, limit: int | None
) -> tuple[Example, ...]:
    """All rows of a file, or this number of rows that the model answers correctly; of free text, any rows."""
    import random

    from cplus.base.files import cache_folder
    from cplus.data.tasks import cached_split, draw_anchors, stack
    from cplus.models.scoring import predict

    if not anchors.isdecimal():
        return source.examples
    examples, count = source.examples[:limit], int(anchors)
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


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Sampled | Block], None]]:
    """A bar of accepted probes with the reasons of rejections; requests count before their block is judged."""
    from collections import Counter

    from cplus.base.terminal import clean, progress
    from cplus.probes.writing import Block, rejections

    with progress() as bars:
        bar = bars.add_task("probes", total=total)
        accepted = 0
        rejected: Counter[str] = Counter()
        pending: Counter[str | None] = Counter()

        def watch(event: Sampled | Block) -> None:
            nonlocal accepted
            if isinstance(event, Block):
                accepted += len(event.probes)
                rejected.update(rejections(event.outcomes))
                pending.clear()
            else:
                pending[event.reason] += 1
            reasons = rejected + Counter({reason: n for reason, n in pending.items() if reason})
            told = ", ".join(f"{reason} {n}" for reason, n in reasons.most_common(4))
            bars.update(
                bar,
                completed=min(total, accepted + pending[None]),
                description=clean(f"probes ({told})" if told else "probes"),
            )

        yield watch


def _report(bank: Bank, folder: Path, *, json: bool, seconds: float | None = None) -> None:
    from cplus.base.terminal import output, print_json

    manifest = bank.manifest
    if json:
        print_json({"bank": str(folder), "probes": len(bank.probes), "seconds": seconds, "manifest": dict(manifest)})
        return
    counts = manifest["counts"]
    rejected = ", ".join(f"{reason} {n}" for reason, n in sorted(counts["rejected"].items(), key=lambda item: -item[1]))
    output.print(
        f"{folder}: {len(bank.probes)} probes of {manifest['model']['name']} by {manifest['interface']}, "
        f"sealed {manifest['probes_sha256'][:12]}; yield {manifest['yield']:.1%} of {counts['requests']} requests"
        + (f" (rejected: {rejected})" if rejected else "")
        + (f"; {seconds:.0f} s" if seconds is not None else ""),
        markup=False,
        soft_wrap=True,
    )
