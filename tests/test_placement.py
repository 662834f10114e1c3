"""Studies place themselves: workers on devices of their own, a run on as many as it needs."""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cplus.lab import STUDIES, runner, runs_of, scale_named
from cplus.lab.estimate import DEVICES, Device, assign, by_width, devices, reported, width
from cplus.lab.records import RunResult
from cplus.lab.runner import Cluster, Worker, in_this_process
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


def names(places: list[tuple[Device, ...]]) -> list[str]:
    return ["+".join(device.name for device in place) for place in places]


def test_workers_get_devices_of_their_own_and_share_them_as_far_as_memory_suffices() -> None:
    assert names(assign(TWO, 2, spec("toy"))) == ["0", "1"]
    assert names(assign(TWO, 3, spec("qwen3-1.7b"))) == ["0", "1"]
    assert names(assign(TWO, 3, spec("qwen3-1.7b", method="sft"))) == ["0", "1", "0"]  # 30 GB each
    assert names(assign(TWO, 8, spec("qwen3-1.7b", method="sft"))) == ["0", "1", "0", "1"]


def test_a_run_that_does_not_fit_one_device_takes_as_many_as_it_needs() -> None:
    assert names(assign(TWO, 2, spec("qwen3-4b"))) == ["0+1"]
    eight = [Device(name=str(i), memory=45e9) for i in range(8)]
    assert width(spec("qwen3-4b"), eight) == 4
    assert names(assign(eight, 8, spec("qwen3-4b"))) == ["0+1+2+3", "4+5+6+7"]
    assert {wide: len(own) for wide, own in by_width([spec("toy"), spec("qwen3-4b")], TWO).items()} == {1: 1, 2: 1}
    small = [Device(name="0", memory=80e9), Device(name="1", memory=8e9)]
    assert names(assign(small, 4, spec("qwen3-1.7b", method="sft"))) == ["0", "0"]  # nothing on the small one
    with pytest.raises(ValueError, match=r"needs 67 GB on each of 2 devices, and the largest has 24 GB free; use"):
        width(spec("qwen3-4b"), [Device(name=name, memory=24e9) for name in "01"])
    about: dict[str, Any] = {"interface": "letter", "method": "cplus", "seed": 0, "num_anchors": 8, "num_probes": 8}
    sequence = SequenceSpec(model="qwen3-4b", tasks=("csqa", "medqa"), **about)
    with pytest.raises(ValueError, match="on each of 1 devices"):
        width(sequence, TWO)


def test_devices_are_those_of_nvidia_smi_or_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "0, GPU-aa, 81000\n1, GPU-bb, 40000\n"
    assert [device.name for device in reported(table, None)] == ["GPU-aa", "GPU-bb"]
    assert reported(table, "1")[0].memory == 40000 * 2**20
    assert reported(table, "") == ()
    monkeypatch.setenv(DEVICES, "0:24,1:12.5")
    assert devices() == (Device(name="0", memory=24e9), Device(name="1", memory=12.5e9))
    monkeypatch.setenv(DEVICES, "0")
    with pytest.raises(ValueError, match="must be like 0:24,1:24"):
        devices()
    monkeypatch.delenv(DEVICES)
    monkeypatch.setenv("PATH", "")
    assert devices() == ()


def test_slurm_jobs_have_as_many_tasks_and_devices_as_a_run_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    runs = [spec("toy"), spec("qwen3-4b")]
    given = {"gpus_per_node": 1, "tasks_per_node": 1, "device_memory_gb": 80}
    assert list(Cluster(logs=tmp_path, parameters=given)(runs, tmp_path)) == []
    one = {"name": "cplus-study", "gpus_per_node": 1, "tasks_per_node": 1, "processes": 1}
    assert asked == [one, {**one, "gpus_per_node": 2, "tasks_per_node": 2, "processes": 2}]
    asked.clear()
    list(Cluster(logs=tmp_path, parameters={})(runs, tmp_path))  # without it, one device per run as before
    assert asked == [{"name": "cplus-study", "processes": 1}]


@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
def test_a_run_of_two_processes_gives_the_figures_of_one(cache: Path, tmp_path: Path) -> None:
    smoke = [own for own in runs_of(STUDIES["e01"], scale_named("smoke")) if own.method == "cplus"]
    own = smoke[0]
    assert isinstance(own, RunSpec)
    assert [ended.failed for ended in in_this_process([own], tmp_path / "one")] == [None]
    worker = Worker(TWO, 1)
    try:
        assert worker.submit(own, tmp_path / "two").result(timeout=600) == "done"
    finally:
        worker.stop()
    one, two = runner.load(own, tmp_path / "one"), runner.load(own, tmp_path / "two")
    assert isinstance(one, RunResult)
    assert isinstance(two, RunResult)
    assert (one.retention, one.acquisition, one.counts, one.external) == (
        two.retention,
        two.acquisition,
        two.counts,
        two.external,
    )
    assert two.environment["placed_on"] == "0,1"
    assert two.extra_bytes == pytest.approx(one.extra_bytes / 2, rel=0.02)  # each process holds its half
