"""Where an interrupted job continues: from its folder, to the end or with the last checkpoint as its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cplus import files, models, world
from cplus.job.checkpoint import is_there
from cplus.job.choices import as_rows, stored
from cplus.job.folder import Folder, check_seen, claimed, read_settings, rewrite
from cplus.job.interruption import Interruption
from cplus.job.prepare import Job, prepare
from cplus.job.progress import say
from cplus.job.run import FinishedJob, work
from cplus.job.settings import AdaptConfig
from cplus.job.usage import PeakMemory


def resume(out: Path, *, epochs: int | None = None, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Continue an interrupted job as if it had never stopped, up to other `epochs` if given; read a finished one.

    Settings that run code, such as `method="python:..."`, must be `repeated`.
    """
    folder = Folder(out)
    with world.joined():
        config, home = _read(folder, repeated)
        if (done := world.shared(lambda: _finished(folder))) is not None:
            if epochs is not None and epochs != config.epochs:
                raise ValueError(
                    f"{out}: this job is finished, so its epochs cannot change; start a new job from its model"
                )
            return done
        if epochs is not None:
            config = config.model_copy(update={"epochs": epochs})
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = _with_reasons(prepare(config, folder, home))
            with claimed(folder):
                world.shared(lambda: rewrite(folder, config, chosen=as_rows(job.chosen)))
                return work(job, interruption, memory)


def finish(out: Path, *, repeated: Mapping[str, Any] | None = None) -> FinishedJob:
    """Write model and receipt from the last checkpoint of an interrupted job, without further training."""
    folder = Folder(out)
    with world.joined():
        config, home = _read(folder, repeated)
        if (done := world.shared(lambda: _finished(folder))) is not None:
            return done
        if not is_there(folder.checkpoint):
            raise ValueError(f"{out}: no checkpoint has been written yet; continue with: cplus adapt --resume {out}")
        memory = PeakMemory(models.choose_device(config.device))
        with Interruption().watching() as interruption:
            job = _with_reasons(prepare(config, folder, home))
            with claimed(folder):
                return work(job, interruption, memory, train_on=False)


def _with_reasons(job: Job) -> Job:
    """The job with the reasons for what it chose when it began; its settings hold the values."""
    return replace(job, chosen=stored(job.folder.settings))


def _read(folder: Folder, repeated: Mapping[str, Any] | None) -> tuple[AdaptConfig, Path]:
    """The job's settings, in a folder that every process sees."""
    world.shared(lambda: read_settings(folder, repeated or {}))
    check_seen(folder)
    return read_settings(folder, repeated or {})


def _finished(folder: Folder) -> FinishedJob | None:
    if not folder.record.is_file():
        return None
    say(f"{folder.root}: this job is finished")
    if folder.work.exists():  # the process was killed after the record was written
        with claimed(folder):
            folder.clear_work()
    return FinishedJob(folder=folder.root, record=files.read_sealed(folder.record))
