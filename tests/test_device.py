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
    own = measured("mixed", *COUNTED, *FAMILIES)[name]
    assert own["apart"] < 0.01  # rounding may turn the sign of a tiny gradient
    for part, syncs, copies in (("update", 0, 1), ("refresh", 4, 6)):
        few, many = own[f"{part} 1"], own[f"{part} 4"]
        assert few.get("sync", 0) == many.get("sync", 0) <= syncs
        assert few.get("to device", 0) == many.get("to device", 0) <= copies
    assert own["update 1"]["launch"] == own["update 4"]["launch"]


@pytest.mark.parametrize("name", FAMILIES)
def test_protect_gives_the_numbers_of_the_host(name: str) -> None:
    assert measured("mixed", *COUNTED, *FAMILIES)[name] < 0.01


def test_mixed_devices_are_an_error() -> None:
    assert "all tensors to be on the same device" in measured("mixed", *COUNTED, *FAMILIES)["mixed"]


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
