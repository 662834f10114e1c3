"""The job's bank: a given one, one from the cache, or a new one; a sealed copy lies beside the model."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from cplus import files
from cplus.config import AdaptConfig
from cplus.data.encoded import Encoded
from cplus.jobs.folder import Folder
from cplus.jobs.rows import Group
from cplus.jobs.view import bank_view, say
from cplus.methods import Past
from cplus.models import Loaded
from cplus.models.gguf import cache_folder
from cplus.probes.bank import Bank
from cplus.probes.build import build, identify
from cplus.probes.local import LocalEngine
from cplus.probes.settings import TOPICS, Settings
from cplus.setting import balanced, constant


def past(anchors: Sequence[Encoded], probes: Sequence[Encoded], num_new: int, name: str = "past") -> Past:
    """The rows of past behaviour of every kind; the latest model is the base model, whose answers the probes carry."""
    return Past(
        name=name,
        anchors=anchors,
        probes=probes,
        synthetic=probes[:num_new],
        constant=constant(probes),
        balanced=balanced(probes),
    )


def settings(config: AdaptConfig, num_new: int) -> Settings:
    """What is asked of the frozen model; by default as many probes as new rows, so that a refresh costs an epoch."""
    return Settings(
        num_probes=config.num_probes or min(512, max(32, num_new)),
        shots=config.shots,
        temperature=config.temperature,
        topics=TOPICS if config.topics else (),
        seed=config.seed,
    )


def sealed(folder: Path, config: AdaptConfig, base: Loaded, anchors: Group, num_new: int, given: Path | None) -> Bank:
    """The job's bank, once: whatever it came from, `folder` holds it from then on."""
    if not folder.exists():
        source = given or _built(config, base, anchors, settings(config, num_new))
        checked(source, base, anchors)
        with files.replacing_folder(folder) as part:
            shutil.copytree(source, part, dirs_exist_ok=True)
    return checked(folder, base, anchors)


def earlier(place: Path, anchors: Group) -> Bank:
    """The bank of an earlier job, whichever model wrote it, if it was sealed for these anchors and their interface."""
    folder = Folder(place).bank
    if not folder.exists():
        raise ValueError(f"{place}: its job kept anchors without a bank; keep it by a method that needs none, like cpl")
    return _same_interface(Bank.load(folder, anchors=anchors.examples), folder, anchors)


def checked(folder: Path, base: Loaded, anchors: Group) -> Bank:
    """The bank in the folder, if it was sealed for this model, these anchors and their interface."""
    bank = Bank.load(folder, model_fingerprint=base.fingerprint, anchors=anchors.examples)
    return _same_interface(bank, folder, anchors)


def _same_interface(bank: Bank, folder: Path, anchors: Group) -> Bank:
    if bank.manifest["interface"] != anchors.interface.name:
        raise ValueError(
            f"probe bank {folder} was sealed for the interface {bank.manifest['interface']}, but the anchors are asked "
            f"by {anchors.interface.name}; rebuild it with 'cplus probe'"
        )
    return bank


def _built(config: AdaptConfig, base: Loaded, anchors: Group, asked: Settings) -> Path:
    engine = LocalEngine(base.model, base.tokenizer)
    identity = identify(base, anchors.interface, anchors.examples, asked, engine)
    place = cache_folder() / "banks" / f"bank-{files.fingerprint(identity)[:24]}"
    if place.exists():
        say(f"bank: reused from {place}")
        return place
    say(f"bank: the frozen model writes {asked.num_probes} probes from {len(anchors.examples)} anchors")
    with bank_view(asked.num_probes) as watch:
        bank = build(
            place, base, anchors.interface, anchors.examples, asked, engine=engine, watch=watch, wait=math.inf, told=say
        )
    requests, seal = bank.manifest["counts"]["requests"], bank.manifest["probes_sha256"]
    say(f"bank: {len(bank.probes)} probes of {requests} requests, sealed {seal[:12]}")
    return place
