"""The sealed bank: probes, and a manifest that identifies their origin and detects any change."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cplus.data.examples import Choice, Example, from_row, to_row
from cplus.files import canonical_json, fingerprint, read_json, replacing_folder, sha256_file, write_json, write_text

FORMAT = "cplus-bank/1"
PROBES, MANIFEST = "probes.jsonl", "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A generated input with the frozen model's own answer, and its origin.

    Paper: the pair (x_j, y_j) of the bank S_A, App. C.1.
    """

    example: Example
    confidence: float
    request: int
    shots: tuple[str, ...]
    topic: str | None


@dataclass(frozen=True, kw_only=True)
class Bank:
    """Probes sealed for one model and one set of anchors."""

    probes: tuple[Probe, ...]
    manifest: Mapping[str, Any]

    @property
    def examples(self) -> tuple[Example, ...]:
        """The probes as examples of the task."""
        return tuple(probe.example for probe in self.probes)

    @staticmethod
    def load(
        path: Path | str, *, model_fingerprint: str | None = None, anchors: Sequence[Example] | None = None
    ) -> Bank:
        """Read a bank; refuse one that was edited, or that was sealed for another model or other anchors."""
        folder = Path(path)
        if not (folder / MANIFEST).is_file() or not (folder / PROBES).is_file():
            raise ValueError(
                f"{folder}: expected a sealed bank with {MANIFEST} and {PROBES}; build one with 'cplus probe'"
            )
        manifest = read_manifest(folder / MANIFEST)
        if model_fingerprint is not None:
            check_model(manifest, model_fingerprint, where=str(folder))
        if anchors is not None:
            check_anchors(manifest, anchors, where=str(folder))
        if sha256_file(folder / PROBES) != manifest["probes_sha256"]:
            raise ValueError(f"{folder / PROBES} was changed after the bank was sealed; rebuild it with 'cplus probe'")
        with (folder / PROBES).open(encoding="utf-8") as lines:
            probes = tuple(probe_from_row(json.loads(line)) for line in lines)
        return Bank(manifest=manifest, probes=probes)


def seal(folder: Path, probes: Sequence[Probe], manifest: Mapping[str, Any]) -> Bank:
    """Write a bank atomically: the folder appears once all of its content is on disk."""
    if folder.exists():
        raise ValueError(f"{folder} already exists; remove it or choose another folder for the bank")
    with replacing_folder(folder) as part:
        write_text(part / PROBES, probe_lines(probes))
        body = {**manifest, "format": FORMAT, "probes_sha256": sha256_file(part / PROBES)}
        write_json(part / MANIFEST, {**body, "seal": fingerprint(body)})
    return Bank.load(folder)


def probe_lines(probes: Iterable[Probe]) -> str:
    """The bank's content as text, the same for the same list of probes."""
    return "".join(canonical_json(probe_to_row(probe)) + "\n" for probe in probes)


def probe_to_row(probe: Probe) -> dict[str, Any]:
    """The JSON row of a probe; all rows of a bank have the same keys, so that they fit a table."""
    return {
        **to_row(probe.example),
        "confidence": probe.confidence,
        "request": probe.request,
        "shots": list(probe.shots),
        "topic": probe.topic,
    }


def probe_from_row(row: Mapping[str, Any]) -> Probe:
    """Read a row written by `probe_to_row`."""
    if len(row.get("choices", ())) == 1:
        # An open question has one choice, the frozen model's answer; a task's own rows must have at least two.
        example: Example = Choice(id=row["id"], question=row["question"], choices=tuple(row["choices"]), answer=0)
    else:
        example = from_row(row, where=f"probe {row['request']}", id="")
    return Probe(
        example=example,
        confidence=row["confidence"],
        request=row["request"],
        shots=tuple(row["shots"]),
        topic=row["topic"],
    )


def described(anchors: Sequence[Example]) -> dict[str, Any]:
    """The anchors as a manifest names them."""
    return {"count": len(anchors), "sha256": anchors_hash(anchors), "ids": [anchor.id for anchor in anchors]}


def anchors_hash(anchors: Sequence[Example]) -> str:
    """The SHA-256 of a set of anchors, independent of their order."""
    return fingerprint(sorted(canonical_json(to_row(anchor)) for anchor in anchors))


def check_model(manifest: Mapping[str, Any], model_fingerprint: str, *, where: str) -> None:
    """Refuse a model other than the one the bank was sealed for."""
    model = manifest["model"]
    if model["fingerprint"] != model_fingerprint:
        raise ValueError(
            f"probe bank {where} was sealed for {model['name']}@{model['fingerprint'][:7]} "
            f"but the base model is @{model_fingerprint[:7]}; rebuild it with 'cplus probe'"
        )


def check_anchors(manifest: Mapping[str, Any], anchors: Sequence[Example], *, where: str) -> None:
    """Refuse anchors other than those the bank was sealed for."""
    sealed, given = manifest["anchors"], anchors_hash(anchors)
    if sealed["sha256"] != given:
        raise ValueError(
            f"probe bank {where} was sealed for {sealed['count']} anchors @{sealed['sha256'][:7]} "
            f"but these {len(anchors)} are @{given[:7]}; rebuild it with 'cplus probe' or use its own anchors"
        )


def read_manifest(path: Path) -> dict[str, Any]:
    """Read a manifest and verify its seal."""
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: expected the format {FORMAT}; rebuild the bank with 'cplus probe'")
    if manifest.pop("seal", None) != fingerprint(manifest):
        raise ValueError(f"{path} was changed after the bank was sealed; rebuild it with 'cplus probe'")
    return manifest
