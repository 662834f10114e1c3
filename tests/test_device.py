"""On another device than the host's, a pretended one: the same jobs and numbers, no mixing of devices, few waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

COUNTED = ("foreach", "sgd", "one-pass")
FAMILIES = ("qwen3", "gemma", "llama")
ROWS = ("agem", "ogd", "norm-matched", "shuffled", "ewc")
HERE = ("mixed", "spoilt", *COUNTED, *(f"counted {name}" for name in ROWS), *FAMILIES)
PRODUCT = ("cplus", "cplus one-pass", "cpl", "ogd", "sft lora", "cplus-curvature", "cplus-repair", "sft", "replay")
LONG = ("agem", "shuffled", "norm-matched", "ewc", "mofo", "cautious")


@cache
def measured(*cases: str) -> dict[str, Any]:
    """What one process found in these cases."""
    command = [sys.executable, Path(__file__).with_name("device_run.py"), *cases]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", COUNTED)
def test_neither_an_update_nor_a_refresh_waits_for_each_parameter(name: str) -> None:
    own = measured(*HERE)[name]
    assert own["apart"] < 0.01  # rounding may turn the sign of a tiny gradient
    for part, syncs, copies in (("update", 0, 1), ("refresh", 4, 6)):
        few, many = own[f"{part} 1"], own[f"{part} 4"]
        assert few.get("sync", 0) == many.get("sync", 0) <= syncs
        assert few.get("to device", 0) == many.get("to device", 0) <= copies
    assert own["update 1"]["launch"] == own["update 4"]["launch"]
    assert own["shares 1"]["sync"] == own["shares 4"]["sync"] <= 2


@pytest.mark.parametrize("name", ROWS)
def test_no_other_row_waits_for_each_parameter(name: str) -> None:
    own = measured(*HERE)[f"counted {name}"]
    for part in ("refresh", "update", "shares"):
        assert own[f"{part} 1"].get("sync", 0) == own[f"{part} 4"].get("sync", 0), part
    assert own["update 4"].get("sync", 0) == {"ewc": 2}.get(name, 0)  # the logged loss, and its penalty


@pytest.mark.parametrize("name", FAMILIES)
def test_protect_gives_the_numbers_of_the_host(name: str) -> None:
    assert measured(*HERE)[name] < 0.01


def test_nothing_moves_from_a_gradient_that_is_not_finite_to_the_refresh_that_refuses_it() -> None:
    for own in measured(*HERE)["spoilt"]:
        assert own["same"]
        assert own["syncs"] == 0
        assert "not finite at step 2, which on fakegpu is read only now; no parameter has moved since" in own["said"]


def test_mixed_devices_are_an_error() -> None:
    assert "all tensors to be on the same device" in measured(*HERE)["mixed"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", PRODUCT)
def test_a_job_has_the_figures_of_the_host(case: str) -> None:
    own = measured("moved", *PRODUCT)[case]
    assert own["same"]
    assert own["apart"] < 0.01


@pytest.mark.timeout(900)
def test_a_checkpoint_continues_on_another_device() -> None:
    assert max(measured("moved", *PRODUCT)["moved"].values()) < 0.01


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", LONG)
def test_every_other_row_has_the_figures_of_the_host(case: str) -> None:
    assert measured(case)[case]["same"]
