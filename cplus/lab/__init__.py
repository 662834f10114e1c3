"""The studies: each experiment of the paper with its question, its runs and its answer."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace

from cplus.lab import chat, e01, e02, e03, e04, e05, e06, e07, e08, e09, e10, e11, e12, e13, e14, facts, frontier
from cplus.lab.records import Result, Spec
from cplus.lab.scales import SCALES, Scale, canonical, scale_named
from cplus.lab.study import Study, Summary, study_of
from cplus.training.settings import RunSpec

STUDIES: dict[str, Study] = {
    (study := study_of(module)).name: study
    for module in (e01, e02, e03, e04, e05, e06, e07, e08, e09, e10, e11, e12, e13, e14, frontier, chat, facts)
}


def studies_named(name: str) -> list[Study]:
    """The study of that name (`e01`, or `E1` as in the paper), or all; an unknown name is an error with suggestions.

    >>> [study.name for study in studies_named("E3")]
    ['e03']
    """
    name = name.lower()
    if name == "all":
        return list(STUDIES.values())
    if len(name) == 2 and name[0] == "e":
        name = f"e0{name[1]}"
    if name not in STUDIES:
        near = difflib.get_close_matches(name, [*STUDIES, "all"], n=3) or [*STUDIES, "all"]
        raise ValueError(f"unknown study {name!r}; did you mean {', '.join(near)}? 'cplus study list' lists them")
    return [STUDIES[name]]


def runs_of(study: Study, scale: Scale) -> list[Spec]:
    """The study's runs at a scale, each once; none if the scale leaves the study out."""
    if study.name not in scale.studies:
        return []
    return list(dict.fromkeys(study.runs(scale)))


def repeated(study: Study, scale: Scale, seeds: str, *, new: str | None, past: str | None) -> list[Spec]:
    """The study's chosen runs on other seeds, given as 201,202, and on other rows."""
    if study.repeated is None or study.name not in scale.studies:
        able = ", ".join(name for name, other in STUDIES.items() if other.repeated)
        raise ValueError(f"{study.name} at scale {scale.name} has no runs to repeat on other seeds; expected {able}")
    if not all(seed.strip().isdigit() for seed in seeds.split(",")):
        raise ValueError(f"--seeds must be whole numbers like 201,202, got {seeds!r}")
    rows = {"task": new, "anchor_task": past}
    rows = {name: value for name, value in rows.items() if value}
    return list(study.repeated(scale, [int(seed) for seed in seeds.split(",")], **rows))


def with_further_methods(specs: Sequence[Spec], methods: Sequence[str]) -> list[Spec]:
    """The runs, and for each run of CPLUS with default settings the same run of these further methods."""
    plain = [
        spec for spec in specs if isinstance(spec, RunSpec) and spec.method == "cplus" and not spec.method_settings
    ]
    return [*specs, *(canonical(replace(spec, method=name)) for name in methods for spec in plain)]


def matching(specs: Sequence[Spec], texts: Sequence[str]) -> list[Spec]:
    """The runs whose settings have these values, each given as NAME=VALUE; no run at all is an error."""
    found = list(specs)
    known = {field.name for spec in found for field in fields(spec)}
    for text in texts if found else ():
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            near = difflib.get_close_matches(name, known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"settings are {', '.join(sorted(known))}"
            raise ValueError(f"--only must be NAME=VALUE with a setting of a run, got {text!r}; {hint}")
        values = {str(getattr(spec, name)) for spec in found if hasattr(spec, name)}
        found = [spec for spec in found if hasattr(spec, name) and str(getattr(spec, name)) == value]
        if not found:
            raise ValueError(f"no run has {text}; there are {', '.join(sorted(values)) or 'none with this setting'}")
    return found


__all__ = [
    "SCALES",
    "STUDIES",
    "Result",
    "Spec",
    "Summary",
    "matching",
    "repeated",
    "runs_of",
    "scale_named",
    "studies_named",
    "with_further_methods",
]
