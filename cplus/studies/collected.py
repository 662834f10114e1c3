"""The records of a folder by study; a damaged one is named and left out, the others count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cplus.experiment.record import RunResult, SequenceResult
from cplus.studies import SCALES, STUDIES, Result, Scale, Spec, Study, Summary, runs_of
from cplus.studies.results import load, path_of
from cplus.studies.study import judged
from cplus.studies.summaries import sequences, single


@dataclass(frozen=True, kw_only=True)
class Answered:
    """A study, the runs it has at the scale, those that are there, and what they say."""

    study: Study
    specs: tuple[Spec, ...]
    results: tuple[Result, ...]
    summary: Summary

    @property
    def runs(self) -> list[RunResult]:
        """The results of single runs."""
        return single(self.results)

    @property
    def sequences(self) -> list[SequenceResult]:
        """The results of sequences."""
        return sequences(self.results)

    @property
    def missing(self) -> list[Spec]:
        """The runs that are not there."""
        there = {result.spec for result in self.results}
        return [spec for spec in self.specs if spec not in there]

    @property
    def verdict(self) -> str:
        """How many of the claims hold, the paper's and our own apart; `not run` where none was run."""
        claims = self.summary.claims
        return judged(claims) if any(claim.verdict != "not run" for claim in claims) else "not run"


@dataclass(frozen=True, kw_only=True)
class Collected:
    """All studies over one folder; `refused` are sentences that name files, `strange` counts files of no run here."""

    scale: Scale
    folder: Path
    studies: Mapping[str, Answered]
    refused: tuple[str, ...]
    strange: int

    @property
    def verdict(self) -> str:
        """How many claims of all studies hold, the paper's and our own apart."""
        return judged(claim for own in self.studies.values() for claim in own.summary.claims)

    def command(self, name: str) -> str:
        """The line that makes a study's results."""
        line = f"cplus study {name} --scale {self.scale.name}"
        return line if self.folder == Path("results") / self.scale.name else f"{line} --out {self.folder.parent}"


def collect(folder: Path) -> Collected:
    """Read every study's results in a folder that bears the name of their scale."""
    scale = SCALES.get(folder.resolve().name)
    if scale is None or not folder.is_dir():
        raise ValueError(
            f"{folder}: expected a folder of results named after their scale ({', '.join(SCALES)}), such as "
            "results/desk; 'cplus study all' makes one"
        )
    specs = {name: tuple(runs_of(study, scale)) for name, study in STUDIES.items()}
    found, refused = _read(dict.fromkeys(spec for own in specs.values() for spec in own), folder)
    if not found and not refused:
        raise ValueError(f"{folder}: no result of scale {scale.name} is there; 'cplus study all' makes them")
    studies = {}
    for name, study in STUDIES.items():
        own = tuple(found[spec] for spec in specs[name] if spec in found)
        studies[name] = Answered(study=study, specs=specs[name], results=own, summary=study.summary(own))
    known = {path_of(spec, folder).name for own in specs.values() for spec in own}
    strange = sum(path.name not in known for path in folder.glob("*.json"))
    return Collected(scale=scale, folder=folder, studies=studies, refused=tuple(refused), strange=strange)


def _read(specs: Mapping[Spec, None], folder: Path) -> tuple[dict[Spec, Result], list[str]]:
    """Each result once, however many studies share it; a refusal names the file without its folder."""
    found, refused = {}, []
    for spec in specs:
        try:
            result = load(spec, folder)
        except ValueError as error:
            path = path_of(spec, folder)
            refused.append(f"{error}".replace(str(path), path.name))
            continue
        if result is not None:
            found[spec] = result
    return found, refused
