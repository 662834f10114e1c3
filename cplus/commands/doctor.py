"""`cplus doctor`: what works here, what does not, and what to install."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer

State: TypeAlias = Literal["good", "note", "absent", "bad"]
_MARKS: dict[State, tuple[str, str]] = {
    "good": ("ok", "green"),
    "note": ("note", "yellow"),
    "absent": ("-", "dim"),
    "bad": ("BAD", "bold red"),
}
_TIMED = (16, 1_000_000)  # tensors and coordinates each: more than any cache holds
_LEAST_FREE = 2_000_000_000  # bytes: a checkpoint and a model of a hundred million parameters


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: what was looked at, how it is, and what to do about it.

    `absent` is optional and not installed, `note` works with a limit; only `bad` keeps cplus from working.
    """

    area: str
    name: str
    state: State
    says: str
    do: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Check installation, devices, precision, compiler, disk, cache and optional engines.

    Exit code 0: everything needed works. 1: something does not, and the line says what to do.
    """
    from cplus.terminal import print_json

    found = list(findings())
    good = not any(one.state == "bad" for one in found)
    print_json({"good": good, "findings": [asdict(one) for one in found]}) if json else _show(found, good)
    if not good:
        raise typer.Exit(1)


def findings() -> Iterator[Finding]:
    """Everything that is looked at, in order; the model is loaded last, when its packages are known to be there."""
    yield from packages()
    yield from devices()
    yield from _guarded("precision", "bfloat16", _bfloat16)
    yield from _guarded("speed", "compiled gate", _compiler)
    yield from _guarded("speed", "gated step", _step)
    yield from storage()
    yield from engines()
    yield from _guarded("work", "built-in model", _toy)


def _guarded(area: str, name: str, look: Callable[[], Finding]) -> Iterator[Finding]:
    """A look that fails is a finding, not an end of the looking."""
    try:
        yield look()
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        yield Finding(area=area, name=name, state="bad", says=first[:200], do="install cplus again: pip install cplus")


def packages() -> Iterator[Finding]:
    """Python and every required package against the range the package asks for."""
    import platform
    from importlib.metadata import requires, version

    from packaging.requirements import Requirement

    where = f"cplus {version('cplus')} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding(area="packages", name="cplus", state="good", says=where)
    wanted = [Requirement(text) for text in requires("cplus") or ()]
    core = [need for need in wanted if need.marker is None or need.marker.evaluate({"extra": ""})]
    tested = _constraints()
    other = []
    for need in core:
        have = _installed(need.name)
        if have is None or not need.specifier.contains(have, prereleases=True):
            says = "not installed" if have is None else f"{have} is installed"
            do = f"pip install '{need.name}{need.specifier}'"
            yield Finding(area="packages", name=need.name, state="bad", says=f"{need.specifier} needed, {says}", do=do)
        elif (
            tested.get(need.name.lower(), have).partition("+")[0] != have.partition("+")[0]
        ):  # +cpu is a build, not a version
            other.append(f"{need.name} {have} (tested: {tested[need.name.lower()]})")
    if other:
        says = f"other versions than the tested ones: {', '.join(other)}"
        do = "pip install --constraint constraints.txt --editable ."
        yield Finding(area="packages", name="versions", state="note", says=says, do=do)
    else:
        yield Finding(area="packages", name="versions", state="good", says=f"{len(core)} packages in their ranges")


def _installed(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _constraints() -> dict[str, str]:
    """The versions the tests run with; known in a source checkout only."""
    path = Path(__file__).parents[2] / "constraints.txt"
    if not path.is_file():
        return {}
    pairs = (line.partition("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name.strip().lower(): pinned.strip() for name, _, pinned in pairs}


def devices() -> Iterator[Finding]:
    """Processor and accelerators, with their memory."""
    import os

    import psutil  # type: ignore[import-untyped]
    import torch

    free = psutil.virtual_memory().available
    says = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads, {free / 1e9:.1f} GB free"
    yield Finding(area="devices", name="cpu", state="good", says=says)
    for index in range(torch.cuda.device_count()):
        left, whole = torch.cuda.mem_get_info(index)
        says = f"{torch.cuda.get_device_name(index)}, {left / 1e9:.1f} of {whole / 1e9:.1f} GB free"
        yield Finding(area="devices", name=f"cuda:{index}", state="good", says=says)
    if torch.backends.mps.is_available():
        yield Finding(area="devices", name="mps", state="good", says="Metal is available")
    elif not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        yield Finding(
            area="devices", name="accelerator", state="absent", says=f"none: {built}; training runs on the CPU"
        )


def _bfloat16() -> Finding:
    """Whether bfloat16 computes what it should, and on which hardware."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(32, 32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        right = bool(((ones @ ones).float() == 32.0).all())
    if not right:
        return Finding(
            area="precision", name="bfloat16", state="bad", says="32 ones do not add up to 32", do="use float32"
        )
    fast = torch.cuda.is_bf16_supported(including_emulation=False) if device == "cuda" else _bfloat16_cpu()
    says = f"on {device}, {'in hardware' if fast else 'emulated: correct, and slower than float32'}"
    return Finding(area="precision", name="bfloat16", state="good" if fast else "note", says=says)


def _bfloat16_cpu() -> bool:
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _compiler() -> Finding:
    """Whether the gate compiles into one pass over memory."""
    import warnings

    from cplus import kernels

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        works = kernels.can_compile("cpu")
    if works:
        return Finding(area="speed", name="compiled gate", state="good", says="kernels are built here")
    says = str(said[0].message) if said else "no kernels are built; the plain gate gives the same numbers"
    return Finding(area="speed", name="compiled gate", state="note", says=says, do="install a C++ compiler, e.g. g++")


def _step() -> Finding:
    """This machine's gated AdamW step, times torch's fused one."""
    from cplus import kernels, native

    if not kernels.can_compile("cpu"):
        return Finding(area="speed", name="gated step", state="absent", says="not measured: no compiled gate")
    ratio, bits = _ratio(), native.vector()[0]
    says = f"{ratio:.2f} times torch's fused AdamW step ({bits}-bit vectors, {native.processor()})"
    measured = {"ratio": ratio, "vector_bits": bits, "processor": native.processor()}
    return Finding(area="speed", name="gated step", state="good", says=says, measured=measured)


def _ratio(rounds: int = 7) -> float:
    """The median over rounds in which both steps run, one after the other."""
    from statistics import median
    from time import perf_counter

    import torch

    from cplus import kernels, optim

    count, size = _TIMED
    params = [torch.nn.Parameter(torch.ones(size)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones(size)
    signs, ema = {id(p): kernels.Signs.of(p) for p in params}, {id(p): torch.zeros(size) for p in params}
    plain, gated = torch.optim.AdamW(params, fused=True), optim.AdamW(params)
    ratios = []
    for t in range(rounds + 1):
        begin = perf_counter()
        plain.step()
        middle = perf_counter()
        gated.armed = optim.Armed(signs=signs, ema=ema, numbers=kernels.gate_numbers(0.9, t + 1))
        gated.step()
        ratios.append((perf_counter() - middle) / (middle - begin))
    return median(ratios[1:])


def storage() -> Iterator[Finding]:
    """Free space here and in the cache, and whether the cache can be written."""
    import os
    import shutil
    import tempfile

    from cplus.files import cache_folder

    cache = cache_folder()
    there = next(place for place in (cache, *cache.parents) if place.exists())
    for name, place in (("here", Path.cwd()), ("cache", there)):
        free = shutil.disk_usage(place).free
        enough = free >= _LEAST_FREE
        do = "" if enough else "make room; a job says beforehand how much it needs: cplus adapt --plan"
        says = f"{free / 1e9:.1f} GB free in {place}"
        yield Finding(area="disk", name=name, state="good" if enough else "note", says=says, do=do)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        do = "set CPLUS_CACHE to a folder that can be written"
        yield Finding(area="cache", name="writable", state="bad", says=f"{there}: {error.strerror}", do=do)
        return
    kept = {kind: len(list((cache / kind).glob("[!.]*"))) for kind in ("models", "banks", "splits")}
    source = "CPLUS_CACHE" if os.environ.get("CPLUS_CACHE") else "the default"
    held = ", ".join(f"{count} {kind}" for kind, count in kept.items())
    yield Finding(area="cache", name="writable", state="good", says=f"{cache} ({source}): {held}")


_ENGINES = {
    "vllm": ("faster probes: cplus probe --vllm", "pip install vllm"),
    "bitsandbytes": ("8-bit optimizers", "pip install bitsandbytes"),
    "tensorboard": ("--report-to tensorboard", "pip install tensorboard"),
    "wandb": ("--report-to wandb", "pip install wandb"),
    "trackio": ("--report-to trackio", "pip install trackio"),
}


def engines() -> Iterator[Finding]:
    """The extras of the package, and what else it can use, each by the line that installs it."""
    from importlib.metadata import metadata, requires

    from packaging.requirements import Requirement

    wanted = [Requirement(text) for text in requires("cplus") or ()]
    for extra in sorted(set(metadata("cplus").get_all("Provides-Extra") or ()) - {"dev"}):
        needs = [n for n in wanted if n.marker and n.marker.evaluate({"extra": extra}) and n.name != "cplus"]
        lacking = [n.name for n in needs if (have := _installed(n.name)) is None or not n.specifier.contains(have)]
        names = ", ".join(n.name for n in needs)
        do = f"pip install 'cplus[{extra}]'" if lacking else ""
        says = names if not lacking else f"{', '.join(lacking)} not installed"
        yield Finding(area="extras", name=extra, state="absent" if lacking else "good", says=says, do=do)
    for name, (purpose, line) in _ENGINES.items():
        have = _installed(name)
        says = purpose if have is None else f"{have}: {purpose}"
        do = line if have is None else ""
        yield Finding(area="engines", name=name, state="absent" if have is None else "good", says=says, do=do)


def _toy() -> Finding:
    """The shortest proof that it all works together: one protected step on the built-in model."""
    import torch

    from cplus import models
    from cplus.attach import protect
    from cplus.data.encoded import Encoded

    loaded = models.load("toy-s", device="cpu")
    rows = [Encoded((3, 4, 5), (6,))]
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-3)
    with protect(optimizer, loaded.model, anchors=rows) as guard:
        guard.refresh()
        ids = torch.tensor([[3, 4, 5, 7]])
        loaded.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return Finding(area="work", name="built-in model", state="good", says="toy-s loads and takes a protected step")


def _show(found: list[Finding], good: bool) -> None:
    from rich.table import Table

    from cplus.terminal import clean, output

    table = Table(box=None, show_header=False)
    for column in ("area", "name", "state", "says"):
        table.add_column(column, overflow="fold", style="bold" if column == "area" else None)
    last = ""
    for one in found:
        word, style = _MARKS[one.state]
        text = clean(one.says + (f"  ->  {one.do}" if one.do else "")).replace("[", "\\[")
        table.add_row("" if one.area == last else one.area, one.name, f"[{style}]{word}[/{style}]", text)
        last = one.area
    output.print(table)
    output.print("Everything needed works." if good else "Something needed does not work: see the lines marked BAD.")
