"""The job's bank: a given one, one from the cache, or a new one; a sealed copy is stored beside the model."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from cplus import files
from cplus.experiment.bank_cache import bank_folder, cached_bank
from cplus.experiment.rows import Group
from cplus.job.folder import Folder
from cplus.job.progress import bank_view, say
from cplus.job.written import Written
from cplus.models import Loaded
from cplus.probes.bank import Bank, described, seal
from cplus.probes.settings import ProbeSettings


def job_bank(folder: Path, settings: ProbeSettings, base: Loaded, anchors: Group, given: Path | None) -> Bank:
    """The job's bank: copied to `folder` on the first call, read from there on later ones."""
    if not folder.exists():
        source = given or _built(base, anchors, settings)
        checked_bank(source, base, anchors)
        with files.replacing_folder(folder) as part:
            shutil.copytree(source, part, dirs_exist_ok=True)
    return checked_bank(folder, base, anchors)


def written_bank(folder: Path, written: Written, settings: ProbeSettings, base: Loaded, anchors: Group) -> Bank:
    """The bank of a job that keeps self-written rows, sealed for its anchors, with what given anchors contribute."""
    if not folder.exists():
        probes, manifest = list(written.probes), dict(written.manifest)
        if written.from_given:
            given = replace(anchors, examples=written.given)
            bank = Bank.load(_built(base, given, replace(settings, num_probes=written.from_given)))
            probes += bank.probes
            part = {"keep": "anchors", "probes": len(bank.probes), "drawn_from": bank.manifest["probes_sha256"]}
            manifest["parts"] = [*manifest["parts"], part]
        seal(folder, probes, {**manifest, "anchors": described(anchors.examples)})
    return checked_bank(folder, base, anchors)


def earlier_bank(place: Path, anchors: Group) -> Bank:
    """The bank of an earlier job, whichever model wrote it, if it was sealed for these anchors and their interface."""
    folder = Folder(place).bank
    if not folder.exists():
        raise ValueError(f"{place}: its job has anchors but no bank; use a method that needs no bank, like cpl")
    return _same_interface(Bank.load(folder, anchors=anchors.examples), folder, anchors)


def checked_bank(folder: Path, base: Loaded, anchors: Group) -> Bank:
    """The bank in the folder, if it was sealed for this model, these anchors and their interface."""
    bank = Bank.load(folder, model_fingerprint=base.fingerprint, anchors=anchors.examples)
    return _same_interface(bank, folder, anchors)


def _same_interface(bank: Bank, folder: Path, anchors: Group) -> Bank:
    if bank.manifest["interface"] != anchors.interface.name:
        raise ValueError(
            f"probe bank {folder} was sealed for the interface {bank.manifest['interface']}, but the anchors use "
            f"{anchors.interface.name}; rebuild it with 'cplus probe'"
        )
    return bank


def _built(base: Loaded, anchors: Group, settings: ProbeSettings) -> Path:
    place = bank_folder(base, anchors.interface, anchors.examples, settings)
    if place.exists():
        say(f"bank: reused from {place}")
        return place
    say(f"bank: the frozen model writes {settings.num_probes} probes from {len(anchors.examples)} anchors")
    with bank_view(settings.num_probes) as watch:
        bank = cached_bank(base, anchors.interface, anchors.examples, settings, watch=watch, notify=say)
    requests, seal = bank.manifest["counts"]["requests"], bank.manifest["probes_sha256"]
    say(f"bank: {len(bank.probes)} probes of {requests} requests, sealed {seal[:12]}")
    return place
