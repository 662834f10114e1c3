"""The commands that write: how each begins, goes on, and what stands on the disk meanwhile."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
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


class Command:
    """One row of the matrix; every method is given the folder in which the command works."""

    name: str
    operations: int
    """The fault comes at one of so many durable operations after the start."""

    def prepare(self, folder: Path) -> None:
        """What stands there before the command begins."""
        write_files(folder)

    def argv(self, folder: Path) -> list[str]:
        """Begins or goes on, whichever is due."""
        raise NotImplementedError

    def accepted(self, folder: Path) -> float:
        """A count of what was done and must not be lost."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Raise where a file looks whole and is not."""
        raise NotImplementedError

    def states(self, folder: Path) -> list[tuple[Path, Path]]:
        """Files to cut short, each with what to remove once it is refused."""
        raise NotImplementedError

    def digest(self, folder: Path) -> Any:
        """What must be the same bits as without the fault."""
        raise NotImplementedError


class Adapt(Command):
    name, operations = "adapt", 24

    def out(self, folder: Path) -> Path:
        """The job's folder."""
        return folder / "out"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        job = asked(folder, model="toy-s", epochs=2, checkpoint_steps=1, evaluate_rows=4)
        values = job.model_dump(mode="json", exclude_none=True)
        (folder / "job.yaml").write_text(json.dumps(values))
        (folder / "stage.yaml").write_text(json.dumps({name: v for name, v in values.items() if name not in DECIDED}))

    def argv(self, folder: Path) -> list[str]:
        begun = (folder / "out" / "settings.json").exists()
        return ["adapt", "--resume", str(folder / "out")] if begun else ["adapt", "--config", str(folder / "job.yaml")]

    def accepted(self, folder: Path) -> float:
        out = self.out(folder)
        if (out / "record.json").exists():
            return math.inf
        kept = out / "work" / "checkpoint.pt"
        step = torch.load(kept, weights_only=True)["state"]["log"]["cursor"]["step"] if kept.exists() else 0
        return float(step) + (out / "work" / "before.json").exists() + (out / "bank").exists()

    def check(self, folder: Path) -> None:
        out = self.out(folder)
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

    def states(self, folder: Path) -> list[tuple[Path, Path]]:
        out = self.out(folder)
        kept = [out / "work" / name for name in ("checkpoint.pt", "before.json")]
        found = [*((path, path) for path in kept), (out / "bank" / "probes.jsonl", out / "bank")]
        return [pair for pair in found if pair[0].exists()]

    def digest(self, folder: Path) -> Any:
        out = self.out(folder)
        record = read_json(out / "record.json")
        hashes = [sha256_file(out / name) for name in ("model/model.safetensors", "bank/probes.jsonl")]
        return hashes, {name: record[name] for name in ("figures", "curve", "steps", "counts", "rows", "notes")}


class Update(Adapt):
    """A stage is a job in a ledger."""

    name, operations = "update", 36

    def out(self, folder: Path) -> Path:
        return folder / "ledger" / "stages" / "001" / "job"

    def argv(self, folder: Path) -> list[str]:
        ledger = folder / "ledger"
        if (ledger / "ledger.json").exists():  # whole: the same command would begin the next stage
            return ["update", str(ledger), "--verify"]
        return ["update", str(ledger), "--config", str(folder / "stage.yaml")]

    def check(self, folder: Path) -> None:
        super().check(folder)
        if update.exists(folder / "ledger"):
            assert not (wrong := update.problems(update.read(folder / "ledger"))), wrong

    def states(self, folder: Path) -> list[tuple[Path, Path]]:
        """Those of the job; of one that has ended the stage as a whole is to be removed."""
        job = self.out(folder)
        weights = job / "model" / "model.safetensors"
        ended = (job / "record.json").exists() and not update.exists(folder / "ledger")
        found = [*super().states(folder), *([(weights, weights)] if ended else [])]
        return [(path, job.parent if ended else remove) for path, remove in found]

    def digest(self, folder: Path) -> Any:
        (entry,) = update.read(folder / "ledger").entries
        dated = ("record.json", "receipt.html", "README.md", "asked.json", "settings.json")
        lasting = {name: own for name, own in entry.files.items() if not name.endswith(dated)}
        return super().digest(folder), entry.before, entry.after, lasting


class Probe(Command):
    name, operations = "probe", 5

    def argv(self, folder: Path) -> list[str]:
        places = ["--anchors", str(folder / "keep.jsonl"), "--out", str(folder / "bank")]
        return ["probe", "toy", *["--set", "device=cpu", "--interface", "cloze", "--num-probes", "200"], *places]

    def accepted(self, folder: Path) -> float:
        if (folder / "bank").exists():
            return math.inf
        return float(sum(journal.read_bytes().count(b"\n") for journal, _ in self.states(folder)))

    def check(self, folder: Path) -> None:
        if (folder / "bank").exists():
            Bank.load(folder / "bank")

    def states(self, folder: Path) -> list[tuple[Path, Path]]:
        return [(path, path) for path in folder.glob("bank.partial.jsonl")]

    def digest(self, folder: Path) -> Any:
        return [sha256_file(folder / "bank" / name) for name in ("probes.jsonl", "manifest.json")]


class Study(Command):
    name, operations = "study", 12

    def prepare(self, folder: Path) -> None:
        """Runs are done by the process that the fault comes to, not by workers of it; it begins knowing nothing."""
        runner.CACHE = runner.ProcessCache()
        runner.Processes.__call__ = lambda self, specs, folder: runner.in_this_process(specs, folder)  # type: ignore[method-assign]

    def argv(self, folder: Path) -> list[str]:
        return ["study", "run", "e08", "--scale", "smoke", "--out", str(folder / "results")]

    def read(self, folder: Path) -> list[Result]:
        return runner.finished(runs_of(STUDIES["e08"], SCALES["smoke"]), folder / "results" / "smoke")

    def accepted(self, folder: Path) -> float:
        return float(len(self.read(folder)))

    def check(self, folder: Path) -> None:
        self.read(folder)

    def states(self, folder: Path) -> list[tuple[Path, Path]]:
        return [(path, path) for path in folder.glob("results/smoke/[!.]*.jsonl")]

    def digest(self, folder: Path) -> Any:
        found = [asdict(result) for result in self.read(folder)]
        return [{name: value for name, value in one.items() if name not in ("seconds", "environment")} for one in found]


COMMANDS = (Adapt(), Probe(), Study(), Update())
