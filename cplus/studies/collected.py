"""The records of a folder by study; a damaged record is reported and left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cplus.experiment.record import RunResult, SequenceResult
from cplus.studies import SCALES, STUDIES, Result, Scale, Spec, Study, Summary, runs_of
from cplus.studies.results import load, path_of
from cplus.studies.study import judged
from cplus.studies.summaries import run_results, sequence_results


@dataclass(frozen=True, kw_only=True)
class CollectedStudy:
    """A study with its runs at the scale, the results that exist, and their summary."""

    study: Study
    specs: tuple[Spec, ...]
    results: tuple[Result, ...]
    summary: Summary

    @property
    def runs(self) -> list[RunResult]:
        """The results of runs on one task."""
        return run_results(self.results)

    @property
    def sequences(self) -> list[SequenceResult]:
        """The results of task sequences."""
        return sequence_results(self.results)

    @property
    def missing(self) -> list[Spec]:
        """The runs without a result."""
        done = {result.spec for result in self.results}
        return [spec for spec in self.specs if spec not in done]

    @property
    def verdict(self) -> str:
        """The verdicts on the claims in one phrase; `not run` if no claim was run."""
        claims = self.summary.claims
        return judged(claims) if any(claim.verdict != "not run" for claim in claims) else "not run"


@dataclass(frozen=True, kw_only=True)
class Collected:
    """All studies of one folder.

    `refused` are the errors of damaged records; `unknown_files` counts JSON files that belong to no run of the scale.
    """

    scale: Scale
    folder: Path
    studies: Mapping[str, CollectedStudy]
    refused: tuple[str, ...]
    unknown_files: int

    @property
    def verdict(self) -> str:
        """The verdicts on the claims of all studies in one phrase."""
        return judged(claim for own in self.studies.values() for claim in own.summary.claims)

    def command(self, name: str) -> str:
        """The command that computes a study's results."""
        line = f"cplus study {name} --scale {self.scale.name}"
        return line if self.folder == Path("results") / self.scale.name else f"{line} --out {self.folder.parent}"


def collect(folder: Path) -> Collected:
    """Read every study's results from a folder named after their scale."""
    scale = SCALES.get(folder.resolve().name)
    if scale is None or not folder.is_dir():
        raise ValueError(
            f"{folder}: expected a folder of results named after their scale ({', '.join(SCALES)}), such as "
            "results/desk; 'cplus study all' writes one"
        )
    specs = {name: tuple(runs_of(study, scale)) for name, study in STUDIES.items()}
    found, refused = _read(dict.fromkeys(spec for own in specs.values() for spec in own), folder)
    if not found and not refused:
        raise ValueError(f"{folder}: no result of scale {scale.name} was found; 'cplus study all' computes them")
    studies = {}
    for name, study in STUDIES.items():
        if not specs[name] and study.paper.startswith("added here"):
            continue  # a place is kept for what the paper has, not for what was added and this scale does not run
        own = tuple(found[spec] for spec in specs[name] if spec in found)
        studies[name] = CollectedStudy(study=study, specs=specs[name], results=own, summary=study.summary(own))
    known = {path_of(spec, folder).name for own in specs.values() for spec in own}
    unknown_files = sum(path.name not in known for path in folder.glob("*.json"))
    return Collected(scale=scale, folder=folder, studies=studies, refused=tuple(refused), unknown_files=unknown_files)


def _read(specs: Mapping[Spec, None], folder: Path) -> tuple[dict[Spec, Result], list[str]]:
    """Read each result once, however many studies share it; errors name the file without its folder."""
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
