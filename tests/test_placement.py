"""Studies place themselves: workers on devices of their own, a run on as many as it needs."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cplus.lab import STUDIES, Spec, runs_of, scale_named
from cplus.lab.estimate import Device, need, teams, width
from cplus.lab.records import RunResult
from cplus.lab.runner import Cluster, Processes, finished, in_this_process
from cplus.training.settings import RunSpec, SequenceSpec

TWO = (Device(name="0", memory=80e9), Device(name="1", memory=80e9))


def spec(model: str, **changes: Any) -> RunSpec:
    about: dict[str, Any] = {
        "task": "csqa",
        "interface": "letter",
        "method": "cplus",
        "seed": 0,
        "num_anchors": 8,
        "num_probes": 8,
    }
    return RunSpec(**{"model": model, **about, **changes})


def places(found: Sequence[Device], workers: int, *runs: Spec) -> list[str]:
    [(_, own)] = teams(found, workers, runs)
    return ["+".join(device.name for device in place) for place in own]


def test_workers_get_devices_of_their_own_and_share_them_as_far_as_memory_suffices() -> None:
    large = [spec("qwen3-1.7b", seed=seed) for seed in range(9)]
    small = [replace(each, method="sft") for each in large]
    assert places(TWO, 3, *large) == ["0", "1"]
    assert places(TWO, 3, *small) == ["0", "1", "0"]  # 30 GB each
    assert places(TWO, 8, *small) == ["0", "1", "0", "1"]
    assert places(TWO, 8, small[0]) == ["0"]
    assert places((), 2, *small) == ["", ""]


def test_a_run_that_does_not_fit_one_device_takes_as_many_as_it_needs() -> None:
    assert places(TWO, 2, spec("qwen3-4b")) == ["0+1"]
    eight = [Device(name=str(i), memory=45e9) for i in range(8)]
    assert places(eight, 8, *(spec("qwen3-4b", seed=seed) for seed in range(9))) == ["0+1+2+3", "4+5+6+7"]
    assert [len(own) for own, _ in teams(TWO, 1, [spec("toy"), spec("qwen3-4b")])] == [1, 1]
    with pytest.raises(ValueError, match=r"needs 67 GB on each of 2 devices, and the smallest has 24 GB; use"):
        width(spec("qwen3-4b"), [Device(name=name, memory=24e9) for name in "01"])
    about: dict[str, Any] = {"interface": "letter", "method": "cplus", "seed": 0, "num_anchors": 8, "num_probes": 8}
    sequence = SequenceSpec(model="qwen3-4b", tasks=("csqa", "medqa"), **about)
    with pytest.raises(ValueError, match="on each of 1 devices"):
        width(sequence, TWO)


def test_slurm_jobs_do_each_run_by_all_their_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []

    class AutoExecutor:
        def __init__(self, folder: str, cluster: str) -> None: ...

        def update_parameters(self, **parameters: Any) -> None:
            asked.append(parameters)

        def batch(self) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        def submit(self, group: Any) -> Any:
            asked[-1]["processes"] = group.processes
            return types.SimpleNamespace(exception=lambda: None, results=lambda: [[], []])

    monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=AutoExecutor))
    for given, processes in (({}, 1), ({"gpus_per_node": 2, "tasks_per_node": 2}, 2)):
        assert list(Cluster(logs=tmp_path, parameters=given)([spec("qwen3-4b")], tmp_path)) == []
        assert asked.pop() == {"name": "cplus-study", **given, "processes": processes}


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_run_of_two_processes_gives_the_figures_of_one(cache: Path, tmp_path: Path) -> None:
    smoke = [own for own in runs_of(STUDIES["e01"], scale_named("smoke")) if own.method == "cplus"]
    assert [ended.failed for ended in in_this_process(smoke[:1], tmp_path / "one")] == [None]
    # Each process holds half of the state, so that a run that is too large for one device fits two.
    small = [Device(name=str(i), memory=(need(smoke[0], 1) + need(smoke[0], 2)) / 2) for i in range(2)]
    ended = list(Processes(workers=1, devices=tuple(small))(smoke[:1], tmp_path / "two"))
    assert [(each.outcome, each.failed) for each in ended] == [("done", None)]
    one, two = (finished(smoke[:1], tmp_path / name)[0] for name in ("one", "two"))
    assert isinstance(one, RunResult)
    assert isinstance(two, RunResult)
    measured = ("retention", "acquisition", "counts", "external")
    assert [getattr(one, name) for name in measured] == [getattr(two, name) for name in measured]
    assert two.environment["placed_on"] == "0,1"
    assert two.extra_bytes == pytest.approx(one.extra_bytes / 2, rel=0.02)
