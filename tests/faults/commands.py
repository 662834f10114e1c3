"""The commands that write: how each begins, goes on, and what stands on the disk meanwhile."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from toyjob import asked, write_files

from cplus.base.files import read_json, sha256_file
from cplus.jobs import update
from cplus.jobs.settings import DECIDED
from cplus.lab import SCALES, STUDIES, Result, runner, runs_of
from cplus.probes.bank import Bank
from cplus.receipts.page import read_receipt


@dataclass(frozen=True, kw_only=True)
class Command:
    """One row of the matrix; every function is given the folder in which the command works.

    `argv` begins or goes on, whichever is due. `accepted` counts what was done and must not be lost. `check` raises
    where a file looks whole and is not. `states` are files to cut short, each with what to remove once it is refused.
    """

    name: str
    prepare: Callable[[Path], None]
    argv: Callable[[Path], list[str]]
    accepted: Callable[[Path], float]
    check: Callable[[Path], Any]
    states: Callable[[Path], list[tuple[Path, Path]]]
    digest: Callable[[Path], Any]
    operations: int
    """The fault comes at one of so many durable operations after the start."""


# adapt, and update, whose stage is a job in a ledger


def _prepare_job(folder: Path) -> None:
    write_files(folder)
    values = asked(folder, model="toy-s", epochs=2, checkpoint_steps=1, evaluate_rows=4).model_dump(
        mode="json", exclude_none=True
    )
    (folder / "job.yaml").write_text(json.dumps(values))
    (folder / "stage.yaml").write_text(json.dumps({name: v for name, v in values.items() if name not in DECIDED}))


def _adapt(folder: Path) -> list[str]:
    begun = (folder / "out" / "settings.json").exists()
    return ["adapt", "--resume", str(folder / "out")] if begun else ["adapt", "--config", str(folder / "job.yaml")]


def _update(folder: Path) -> list[str]:
    ledger = folder / "ledger"
    if (ledger / "ledger.json").exists():  # whole: the same command would begin the next stage
        return ["update", str(ledger), "--verify"]
    return ["update", str(ledger), "--config", str(folder / "stage.yaml")]


def _stage(folder: Path) -> Path:
    return folder / "ledger" / "stages" / "001" / "job"


def _accepted_by_job(out: Path) -> float:
    if (out / "record.json").exists():
        return math.inf
    kept = out / "work" / "checkpoint.pt"
    step = torch.load(kept, weights_only=True)["state"]["log"]["cursor"]["step"] if kept.exists() else 0
    return float(step) + (out / "work" / "before.json").exists() + (out / "bank").exists()


def _check_job(out: Path) -> None:
    for path in (*out.glob("*.json"), *(out / "work").glob("*.json")):
        read_json(path)
    if (out / "bank").is_dir():
        Bank.load(out / "bank")
    if (out / "model").exists():
        assert read_json(out / "model" / "config.json")
        with safe_open(out / "model" / "model.safetensors", "pt") as weights:
            assert weights.keys()
    if (out / "record.json").exists():
        read_receipt(out)


def _check_ledger(folder: Path) -> None:
    _check_job(_stage(folder))
    if update.exists(folder / "ledger"):
        assert not (wrong := update.problems(update.read(folder / "ledger"))), wrong


def _states_of_stage(folder: Path) -> list[tuple[Path, Path]]:
    """Those of the job; of one that has ended the stage as a whole is to be removed."""
    job = _stage(folder)
    weights = job / "model" / "model.safetensors"
    ended = (job / "record.json").exists() and not update.exists(folder / "ledger")
    found = [*_states_of_job(job), *([(weights, weights)] if ended else [])]
    return [(path, job.parent if ended else remove) for path, remove in found]


def _states_of_job(out: Path) -> list[tuple[Path, Path]]:
    runner, bank = out / "work", out / "bank"
    found = [(runner / "checkpoint.pt", runner / "checkpoint.pt"), (runner / "before.json", runner / "before.json")]
    return [pair for pair in [*found, (bank / "probes.jsonl", bank)] if pair[0].exists()]


def _digest_of_job(out: Path) -> Any:
    record = read_json(out / "record.json")
    hashes = [sha256_file(out / name) for name in ("model/model.safetensors", "bank/probes.jsonl")]
    return hashes, {name: record[name] for name in ("figures", "curve", "steps", "counts", "rows", "notes")}


def _digest_of_ledger(folder: Path) -> Any:
    (entry,) = update.read(folder / "ledger").entries
    dated = ("record.json", "receipt.html", "README.md", "asked.json", "settings.json")
    lasting = {name: own for name, own in entry.files.items() if not name.endswith(dated)}
    return _digest_of_job(_stage(folder)), entry.before, entry.after, lasting


# probe


def _probe(folder: Path) -> list[str]:
    options = {"anchors": folder / "keep.jsonl", "interface": "cloze", "num-probes": 200, "out": folder / "bank"}
    return [
        "probe",
        "toy",
        "--set",
        "device=cpu",
        *(text for name, v in options.items() for text in (f"--{name}", str(v))),
    ]


def _accepted_by_probe(folder: Path) -> float:
    journal = folder / "bank.partial.jsonl"
    if (folder / "bank").exists():
        return math.inf
    return float(journal.read_bytes().count(b"\n")) if journal.exists() else 0.0


def _check_probe(folder: Path) -> None:
    if (folder / "bank").exists():
        Bank.load(folder / "bank")


def _states_of_probe(folder: Path) -> list[tuple[Path, Path]]:
    journal = folder / "bank.partial.jsonl"
    return [(journal, journal)] if journal.exists() else []


def _digest_of_probe(folder: Path) -> Any:
    return [sha256_file(folder / "bank" / name) for name in ("probes.jsonl", "manifest.json")]


# study


def _study(folder: Path) -> list[str]:
    return ["study", "run", "e08", "--scale", "smoke", "--out", str(folder / "results")]


def _in_this_process() -> None:
    """Runs are done by the process that the fault comes to, not by workers of it; it begins knowing nothing."""
    runner.CACHE = runner.ProcessCache()
    runner.Processes.__call__ = lambda self, specs, folder: runner.in_this_process(specs, folder)  # type: ignore[method-assign]


def _results(folder: Path) -> list[Path]:
    return list(folder.glob("results/smoke/[!.]*.jsonl"))


def _read_study(folder: Path) -> list[Result]:
    return runner.finished(runs_of(STUDIES["e08"], SCALES["smoke"]), folder / "results" / "smoke")


def _digest_of_study(folder: Path) -> Any:
    found = [asdict(result) for result in _read_study(folder)]
    return [{name: value for name, value in one.items() if name not in ("seconds", "environment")} for one in found]


COMMANDS = (
    Command(
        name="adapt",
        prepare=_prepare_job,
        argv=_adapt,
        accepted=lambda folder: _accepted_by_job(folder / "out"),
        check=lambda folder: _check_job(folder / "out"),
        states=lambda folder: _states_of_job(folder / "out"),
        digest=lambda folder: _digest_of_job(folder / "out"),
        operations=24,
    ),
    Command(
        name="probe",
        prepare=write_files,
        argv=_probe,
        accepted=_accepted_by_probe,
        check=_check_probe,
        states=_states_of_probe,
        digest=_digest_of_probe,
        operations=5,
    ),
    Command(
        name="study",
        prepare=lambda folder: _in_this_process(),
        argv=_study,
        accepted=lambda folder: float(len(_read_study(folder))),
        check=_read_study,
        states=lambda folder: [(path, path) for path in _results(folder)],
        digest=_digest_of_study,
        operations=12,
    ),
    Command(
        name="update",
        prepare=_prepare_job,
        argv=_update,
        accepted=lambda folder: _accepted_by_job(_stage(folder)),
        check=_check_ledger,
        states=_states_of_stage,
        digest=_digest_of_ledger,
        operations=36,
    ),
)
