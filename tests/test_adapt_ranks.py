"""`cplus adapt` in several processes: the bits of one, one report of a failure, resumed by any number of them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_job import BANK, free_port
from toyjob import asked, same, write_files, written
from typer.testing import CliRunner

from cplus.base.terminal import console, output
from cplus.cli.app import app
from cplus.distributed import processes
from cplus.jobs import prepare
from cplus.jobs.adapt import adapt, resume

pytestmark = [pytest.mark.usefixtures("one_thread", "cache"), pytest.mark.timeout(900)]

TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
ACCELERATE += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]


def started(command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """A script or a launcher on this machine's processors, one thread for each process."""
    environment = {**os.environ, "CPLUS_CACHE": str(cache), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parent)))
    run = [sys.executable, *command]
    return subprocess.run(run, env=environment, capture_output=True, text=True, check=False)


def forked(folder: Path, cache: Path, *names: str) -> dict[str, list[int]]:
    """How each process of these jobs ended."""
    done = started([str(Path(__file__).with_name("ranks_job.py")), str(folder), *names], cache)
    assert done.returncode == 0, done.stderr
    ends: dict[str, list[int]] = json.loads(done.stdout.splitlines()[-1])
    return ends


def said(folder: Path, name: str, size: int = 2) -> list[str]:
    """What each process of a job printed."""
    return [(folder / f"{name}-{rank}.err").read_text(encoding="utf-8") for rank in range(size)]


def record(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "record.json").read_text(encoding="utf-8"))
    return found


def check_alike(out: Path, other: Path) -> None:
    """The same figures and costs, and the same weights to rounding, which flips the mask of a few coordinates."""
    here, there = record(out), record(other)
    for name in ("counts", "steps", "epochs", "notes", "rows"):
        assert here[name] == there[name], name
    padded = {"preservation_percent"}  # more processes pad less
    assert {name: here["figures"][name] for name in here["figures"].keys() - padded} == {
        name: there["figures"][name] for name in there["figures"].keys() - padded
    }
    for entry in (other / "bank").iterdir():
        assert (out / "bank" / entry.name).read_bytes() == entry.read_bytes(), entry.name
    for name in ("training_rows", "training_tokens", "preservation_rows", "preservation_tokens"):
        assert here["cost"][name] == there["cost"][name], name
    for point, expected in zip(here["curve"], there["curve"], strict=True):
        assert point == pytest.approx(expected, rel=1e-3)
    left, right = written(out), written(other)
    moved = torch.cat([(left[name] - right[name]).abs().flatten() for name in right])
    assert float((moved > 1e-5).float().mean()) < 0.01
    assert {entry.name for entry in out.iterdir()} == {entry.name for entry in other.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, and the job as one process does it."""
    place = tmp_path_factory.mktemp("job")
    write_files(place)
    adapt(asked(place, checkpoint_steps=1, out=place / "one"))
    return place


@pytest.fixture(scope="module")
def ends(folder: Path, cache: Path) -> dict[str, list[int]]:
    """Jobs of two processes that do not end well, and one whose weights are copied."""
    found = forked(folder, cache, "killed", "killed-first", "failing", "stopped", "other", "unmet", "ddp")
    for size in (1, 2, 4):
        shutil.copytree(folder / "killed", folder / f"killed{size}")
    return found


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """The job under torchrun."""
    config = asked(folder, checkpoint_steps=1, out=folder / "two")
    settings = config.model_dump(mode="json")
    (folder / "two.yaml").write_text(json.dumps(settings), encoding="utf-8")
    # With a cache of its own, so that two processes write the bank.
    command = ["-m", *TORCHRUN, "-m", "cplus", "adapt", "--config", str(folder / "two.yaml"), "--json"]
    done = started(command, folder / "cache of two")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 9  # one object, from one process
    for line in ("new: choice rows", "parameters, ", "written to"):
        assert done.stderr.count(line) == 1, done.stderr
    return folder / "two"


@pytest.mark.long
def test_torchrun_ends_as_one_process(folder: Path, two: Path) -> None:
    check_alike(two, folder / "one")
    shards, whole = (record(out)["cost"]["extra_bytes"] for out in (two, folder / "one"))
    assert shards == pytest.approx(whole / 2, rel=0.01)  # each process holds its half of the gate


@pytest.mark.long
def test_two_processes_write_the_bank_of_one(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forked(folder, cache, "bank") == {"bank": [0, 0]}, said(folder, "bank")
    monkeypatch.setenv("CPLUS_CACHE", str(folder / "cache of one"))
    adapt(asked(folder, checkpoint_steps=1, out=folder / "bank1", **BANK))
    assert record(folder / "bank1")["bank"]["counts"]["requests"] > 128  # more than a block
    check_alike(folder / "bank", folder / "bank1")


def test_a_requirement_that_is_not_met_ends_every_process_with_its_code(
    folder: Path, ends: dict[str, list[int]]
) -> None:
    assert ends["unmet"] == [2, 2], said(folder, "unmet")
    first, second = said(folder, "unmet")
    assert first.count("NOT MET: acquisition at least 0.7") == 1
    assert "NOT MET" not in second


@pytest.mark.long
def test_torchrun_reports_what_is_not_met_and_its_code(folder: Path, cache: Path) -> None:
    settings = asked(folder, epochs=1, require=["acquisition>=0.7"], lr=1e-6, out=folder / "unmet2").model_dump(
        mode="json"
    )
    (folder / "unmet2.yaml").write_text(json.dumps(settings), encoding="utf-8")
    done = started(["-m", *TORCHRUN, "-m", "cplus", "adapt", "--config", str(folder / "unmet2.yaml")], cache)
    assert done.returncode == 1  # whatever the code of its processes
    assert done.stdout.count("NOT MET") == 1
    assert "exitcode  : 2" in done.stderr
    assert "traceback : NOT MET: acquisition at least 0.7; its lower 95 % bound is" in done.stderr


def test_copies_end_as_one_process(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["ddp"] == [0, 0], said(folder, "ddp")
    check_alike(folder / "ddp", folder / "one")


def test_a_killed_process_ends_the_job_with_one_sentence(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["killed"] == [1, -9]
    report = "error: another of the 2 processes ended: it was killed, or ran out of memory; continue with: cplus adapt"
    assert f"{report} --resume {folder / 'killed'}" in said(folder, "killed")[0]
    assert not (folder / "killed" / "record.json").exists()


def test_a_killed_first_process_is_reported_by_the_second(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["killed-first"] == [-9, 1]
    report = said(folder, "killed-first")[1]
    assert report.count("another of the 2 processes ended: it was killed, or ran out of memory; continue with:") == 1
    # Whether torch's own warning about its store comes before it depends on what the second process waits for.
    assert report.rstrip().endswith(f"--resume {folder / 'killed-first'}")


def test_a_killed_job_is_resumed_by_one_process(folder: Path, ends: dict[str, list[int]]) -> None:
    resume(folder / "killed1")
    check_alike(folder / "killed1", folder / "one")


@pytest.mark.long
def test_a_killed_job_is_resumed_by_two_under_accelerate(
    folder: Path, ends: dict[str, list[int]], two: Path, cache: Path
) -> None:
    done = started(["-m", *ACCELERATE, "-m", "cplus", "adapt", "--resume", str(folder / "killed2")], cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("resumed after update 4") == 1
    check_alike(folder / "killed2", folder / "one")
    assert same(written(folder / "killed2"), written(two))  # as many processes, so bit for bit


@pytest.mark.long
def test_a_killed_job_is_resumed_by_four_and_three(folder: Path, ends: dict[str, list[int]], cache: Path) -> None:
    found = forked(folder, cache, "resumed-4-killed4", "three")
    assert found == {"resumed-4-killed4": [0] * 4, "three": [0] * 3}
    for out in ("killed4", "three"):  # three do not divide a batch of four
        check_alike(folder / out, folder / "one")


@pytest.mark.long
def test_adapters_end_as_in_one_process(folder: Path, cache: Path) -> None:
    changes: dict[str, Any] = {"lora": {"r": 4}, "keep_best": True}
    adapt(asked(folder, checkpoint_steps=1, out=folder / "lora1", **changes))
    assert forked(folder, cache, "lora") == {"lora": [0, 0]}, said(folder, "lora")
    check_alike(folder / "lora", folder / "lora1")


@pytest.mark.long
def test_copies_share_rows_whose_gradients_are_squared_one_by_one(folder: Path, cache: Path) -> None:
    assert forked(folder, cache, "curvature") == {"curvature": [0, 0]}, said(folder, "curvature")
    adapt(asked(folder, checkpoint_steps=1, out=folder / "curvature1", method="cplus-curvature", epochs=1))
    one, two = written(folder / "curvature1"), written(folder / "curvature")
    for name, value in one.items():  # squares are summed in another order and stored in bfloat16
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-5)


def test_an_error_of_one_process_is_reported_by_it_alone(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["failing"] == [1, 1]
    first, second = said(folder, "failing")
    assert "error" not in first
    assert second.startswith("error: process 1 of 2 on ")
    assert second.strip().endswith("the disk is gone")


def test_a_signal_to_one_process_stops_and_saves_all(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["stopped"] == [143, 143]
    first, second = said(folder, "stopped")
    assert first.count("and saved. Continue with: cplus adapt --resume") == 1
    assert "saved" not in second
    kept = json.loads((folder / "stopped" / "work" / "checkpoint.json").read_text(encoding="utf-8"))
    assert f"stopped after update {kept['step']} of 9" in first
    shards = folder / "stopped" / "work" / kept["folder"]
    assert {"rest.pt", ".metadata"} < kept["files"].keys() == {entry.name for entry in shards.iterdir()}
    assert [entry.name for entry in shards.parent.glob("shards-*")] == [shards.name]  # earlier ones are removed


def test_a_process_with_another_file_is_refused(folder: Path, ends: dict[str, list[int]]) -> None:
    assert ends["other"] == [1, 1]
    first, second = said(folder, "other")
    assert "error: the 2 processes differ in their rows: process 1 has" in first
    assert second == ""
    assert not (folder / "other").exists()


@pytest.mark.long
def test_a_folder_that_one_process_does_not_see_is_refused(folder: Path, cache: Path) -> None:
    assert forked(folder, cache, "unshared") == {"unshared": [1, 1]}
    first, second = said(folder, "unshared")
    assert "does not see this folder; choose an out that all nodes share" in first
    assert second == ""


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        with (
            pytest.raises(ValueError, match=rf"could not meet at 127.0.0.1:{port} .* another port"),
            processes.joined(),
        ):
            raise AssertionError
    assert processes.size() == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"repair": True}, "repair runs in one process"),
        ({"method": "agem"}, "method 'agem' needs whole weights in every process; add sharding ddp"),
        ({"method": "ewc"}, "method 'ewc' needs whole weights in every process; add sharding ddp"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    config = asked(folder, **changes)
    with pytest.raises(ValueError, match=sentence):
        prepare.check_processes(config, prepare.row_of(config))


def test_other_commands_need_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    run = CliRunner().invoke(app, ["methods"])
    assert "expected one process, got 2: cplus methods runs in one alone" in str(run.exception)


def test_without_a_launcher_a_process_is_alone() -> None:
    assert processes.started() == (0, 1)
    with processes.joined():
        assert (processes.rank(), processes.size(), processes.first(), processes.neighbours()) == (0, 1, True, 1)
        assert processes.shared(lambda: 7) == processes.in_turn(lambda: 7) == 7
        assert processes.spread([1, 2], lambda rows: [2 * row for row in rows]) == [2, 4]
        processes.agree("a value", 1)


def test_a_first_process_that_never_starts_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (console, output):  # a process that is not the first is quiet from here on; this one is not
        monkeypatch.setattr(own, "quiet", own.quiet)
    monkeypatch.setattr(processes, "_ONE_MACHINE", timedelta(seconds=1))
    port = str(free_port())
    numbers = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    sentence = rf"could not meet at 127.0.0.1:{port} .* did not start within 1"
    with pytest.raises(ValueError, match=sentence), processes.joined():
        raise AssertionError
    assert not console.quiet  # the second process reports it
    assert processes.size() == 1
