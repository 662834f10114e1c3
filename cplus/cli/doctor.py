"""`cplus doctor`: whether this machine and this installation will work."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import metadata, requires
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer
from huggingface_hub import constants
from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from cplus import models
from cplus.base.environment import environment, free_memory, installed
from cplus.base.files import cache_folder
from cplus.base.terminal import clean, output, print_json
from cplus.cli.options import Device, Json
from cplus.core.rows import Encoded

if TYPE_CHECKING:
    import torch

State: TypeAlias = Literal["good", "note", "absent", "bad"]
_MARKS: dict[State, tuple[str, str]] = {
    "good": ("ok", "green"),
    "note": ("note", "yellow"),
    "absent": ("-", "dim"),
    "bad": ("BAD", "bold red"),
}
_OPTIONAL = ("vllm", "tensorboard", "wandb", "trackio")  # used if installed, in no extra of ours
REPORT = "attach the output of 'cplus doctor --gpu --json' to an issue"
_LEAST_FREE = 2_000_000_000  # bytes: a checkpoint and a model of a hundred million parameters


@dataclass(frozen=True)
class Finding:
    """One line of the report: `absent` is optional, `note` works with a limit, `bad` keeps cplus from working."""

    area: str
    name: str
    state: State
    says: str
    do: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Only run every kernel, count host syncs and time a step; about a minute.")
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Check packages, devices, compiled kernels, disk, cache, hub and optional parts, or with --gpu the kernels.

    Exit code 0: everything required works. 1: something does not, and its line says what to do.
    """
    checks = (packages, devices, kernels, storage, hub, optional, training)
    if device != "auto" and not gpu:
        raise ValueError("--device chooses where --gpu runs; give both")
    asked = (devices, partial(accelerator, models.choose_device(device))) if gpu else checks
    found = [finding for check in asked for finding in _guarded(check)]
    good = not any(one.state == "bad" for one in found)
    report = {"good": good, "findings": [asdict(one) for one in found]}
    if json:
        import torch

        print_json(report | {"environment": environment(threads=torch.get_num_threads(), device=device)})
    else:
        _show(found, good)
    if not good:
        raise typer.Exit(1)


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; its failure is a finding too, and the other checks still run."""
    try:
        yield from check()
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        do = "reinstall cplus: pip install --force-reinstall cplus"
        yield Finding(getattr(check, "__name__", "gpu"), "failed", "bad", reason, do)


def packages() -> Iterator[Finding]:
    """Python and every required package against its version range."""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield Finding("packages", "cplus", "good", f"{installed('cplus')} on {system}")
    for need in _requirements(""):
        have = installed(need.name) or "nothing"
        if not _fits(need):
            says = f"{need.specifier} required, {have} is installed"
            yield Finding("packages", need.name, "bad", says, f"pip install '{need.name}{need.specifier}'")
        elif need.name in ("torch", "transformers"):
            yield Finding("packages", need.name, "good", have)


def _requirements(extra: str) -> list[Any]:
    """What the package requires, or what this extra adds to it."""
    wanted = [Requirement(text) for text in requires("cplus") or ()]
    return [n for n in wanted if (n.marker.evaluate({"extra": extra}) if n.marker else not extra)]


def _fits(need: Requirement) -> bool:
    have = installed(need.name)
    return have is not None and need.specifier.contains(have, prereleases=True)


def devices() -> Iterator[Finding]:
    """Processor and accelerators, with their free memory."""
    import torch

    says = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used, {free_memory() / 1e9:.1f} GB free"
    yield Finding("devices", "cpu", "good", says)
    for index in range(torch.cuda.device_count()):
        left, whole = torch.cuda.mem_get_info(index)
        kind = "sm_{}{}".format(*torch.cuda.get_device_capability(index))
        says = f"{torch.cuda.get_device_name(index)}, {kind}, {left / 1e9:.1f} of {whole / 1e9:.1f} GB free"
        yield Finding("devices", f"cuda:{index}", "good", says)
    if torch.backends.mps.is_available():
        yield Finding("devices", "mps", "good", "Metal is available")
    elif not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
        yield Finding("devices", "accelerator", "absent", f"{why}; training runs on the CPU")


def kernels() -> Iterator[Finding]:
    """Whether the gate compiles, and what its AdamW step costs compared with torch's fused one."""
    import torch

    from cplus.cli.gpu import step_milliseconds
    from cplus.core import kernels as native

    if not native.can_compile("cpu"):
        says = "not compiled; the plain gate gives the same numbers, more slowly"
        yield Finding("kernels", "gated step", "note", says, "install a C++ compiler, e.g. g++")
        return
    times = step_milliseconds(torch.device("cpu"))
    ratio, bits = times["one_pass"] / times["plain"], native.vector()[0]
    measured = {"ratio": ratio, "vector_bits": bits, "processor": native.processor()}
    says = f"compiled; {ratio:.2f} times torch's fused AdamW step ({bits}-bit vectors, {native.processor()})"
    yield Finding("kernels", "gated step", "good", says, measured=measured)


def accelerator(device: torch.device) -> Iterator[Finding]:
    """Every kernel against the algorithm, the time of a step, and the syncs of a step and a refresh."""
    from cplus.cli.gpu import examined
    from cplus.core import kernels as native

    if device.type == "cpu":
        says = "No GPU was used. No kernel ran on a GPU, no waiting for one was counted, no speed of one was measured: "
        says += "what follows ran on the processor."
        yield Finding("gpu", "not run", "note", says, "run it where a GPU is, and attach the JSON to an issue")
    if not native.can_compile(device.type):
        says = f"the kernels do not compile for {device.type}"
        yield Finding("gpu", "kernels", "bad", says, "see the warning above for what is missing")
        return
    for check, passed, says, measured in examined(device):
        yield Finding("gpu", check, "good" if passed else "bad", says, "" if passed else REPORT, measured)


def storage() -> Iterator[Finding]:
    """Free disk space here and in the cache, and whether the cache is writable."""
    cache = cache_folder()
    there = next(place for place in (cache, *cache.parents) if place.exists())
    for name, shown, place in (("here", Path.cwd(), Path.cwd()), ("cache", cache, there)):
        free = shutil.disk_usage(place).free
        do = "free some space; 'cplus adapt --plan' prints what a job needs" if free < _LEAST_FREE else ""
        yield Finding("disk", name, "note" if do else "good", f"{free / 1e9:.1f} GB free in {shown}", do)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding("disk", "writable", "bad", f"{there}: {error.strerror}", "set CPLUS_CACHE to a writable folder")


def hub() -> Iterator[Finding]:
    """Whether models and data can be fetched; without the hub, local files and the cache still work."""
    do = "use a folder, a GGUF file or what is cached"
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "offline", "note", "HF_HUB_OFFLINE is set", do)
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:
        pass  # an answer, if not the page
    except OSError as error:
        says = f"{constants.ENDPOINT} is not reachable: {getattr(error, 'reason', error)}"
        yield Finding("hub", "unreachable", "note", says, f"check network and proxy, or {do}")
        return
    yield Finding("hub", "reachable", "good", str(constants.ENDPOINT))


def optional() -> Iterator[Finding]:
    """The optional parts, each with the command that installs it."""
    extras = sorted(set(metadata("cplus").get_all("Provides-Extra") or ()) - {"dev", "fuzz"})
    lacking = {f"cplus[{extra}]": [n.name for n in _requirements(extra) if not _fits(n)] for extra in extras}
    lacking |= {name: [] if installed(name) else [name] for name in _OPTIONAL}
    for name, missing in lacking.items():
        if missing:
            yield Finding("optional", name, "absent", f"{', '.join(missing)} not installed", f"pip install '{name}'")
        else:
            yield Finding("optional", name, "good", "installed")


def training() -> Iterator[Finding]:
    """One protected step on the built-in model, the shortest proof that the parts work together."""
    import torch

    from cplus.core.guard import protect

    loaded = models.load("toy-s", device="cpu")
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-3)
    with protect(optimizer, loaded.model, anchors=[Encoded((3, 4, 5), (6,))]) as guard:
        guard.refresh()
        ids = torch.tensor([[3, 4, 5, 7]])
        loaded.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    yield Finding("training", "built-in model", "good", "toy-s loads and takes a protected step")


def _show(found: list[Finding], good: bool) -> None:
    table = Table("area", "name", "state", "says", box=None, show_header=False)
    for one in found:
        text = one.says + (f"  ->  {one.do}" if one.do else "")
        table.add_row(Text(one.area, "bold"), one.name, Text(*_MARKS[one.state]), clean(text))
    output.print(table)
    output.print(
        "Everything required works." if good else "Something required does not work: see the lines marked BAD."
    )
