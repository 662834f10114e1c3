"""Records: what was asked, what came out, and on what it ran. One JSON file a run; stdlib only."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cplus.files import fingerprint, read_json, write_json

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Everything that decides a run's numbers; two equal specs are the same run."""

    model: str
    task: str
    interface: str
    method: str
    seed: int
    num_anchors: int
    num_probes: int
    num_new: int | None = None
    shots: int = 2
    temperature: float = 0.8
    anchor_weight: float = 0.5
    beta: float = 0.9
    optimizer: str = "adamw"
    lr: float = 1e-6
    weight_decay: float = 0.1
    epochs: int = 25
    batch_size: int = 1
    order: str = "file"
    external: tuple[str, ...] = ()
    external_limit: int | None = None
    evaluate_every: int = 0

    def key(self) -> str:
        """A short name of the spec, from its content."""
        return fingerprint(asdict(self))[:16]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """A run's figures, with the spec and the environment that made them; percentages are 0-100.

    `external` holds for each outside task the accuracy before and after and the share of right answers kept.
    `cost` holds FLOPs of training and of recurring preservation passes, rows and tokens; `overlap` counts the past
    questions that also stand in the bank, and `retention_uncovered` leaves them out.
    """

    spec: RunSpec
    retention: float
    retention_uncovered: float
    acquisition: float
    external: dict[str, dict[str, float]]
    counts: dict[str, int]
    cost: dict[str, int]
    seconds: float
    extra_bytes: int
    curve: list[dict[str, float]] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def external_kept(self) -> float | None:
        """The mean over outside tasks of the share of right answers kept; None where there is no such task."""
        kept = [task["kept"] for task in self.external.values()]
        return sum(kept) / len(kept) if kept else None


def save_result(result: RunResult, folder: Path) -> Path:
    """Write the result under its spec's name."""
    path = folder / f"{result.spec.method}-{result.spec.seed}-{result.spec.key()}.json"
    write_json(path, {"schema": SCHEMA, **asdict(result)})
    return path


def load_result(path: Path) -> RunResult:
    """Read a result; one of another schema or with other fields is refused by name."""
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.pop("schema", None) != SCHEMA:
        raise ValueError(f"{path}: expected a run record of schema {SCHEMA}; it was written by another version")
    try:
        spec = raw.pop("spec")
        spec["external"] = tuple(spec["external"])
        return RunResult(spec=RunSpec(**spec), **raw)
    except (KeyError, TypeError) as error:
        names = ", ".join(f.name for f in fields(RunResult))
        raise ValueError(f"{path}: expected the fields {names}; {error}") from error


def environment(*, threads: int, device: str) -> dict[str, Any]:
    """What could change a number besides the spec: versions, machine, threads, commit."""
    packages = ("cplus", "torch", "transformers", "tokenizers", "numpy")
    return {
        "versions": {name: _version(name) for name in packages},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "threads": threads,
        "device": device,
        "commit": _commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, None for an installed package."""
    root = Path(__file__).parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
