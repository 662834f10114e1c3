"""On another device than the host's: the same numbers, no mixing, and few waits, on a pretend accelerator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

OPTIMIZERS = ("loop", "foreach", "sgd")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What each optimizer's training measured."""
    done = subprocess.run([sys.executable, Path(__file__).with_name("device_run.py")], capture_output=True, check=True)
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def test_the_numbers_are_those_of_the_host(found: dict[str, Any]) -> None:
    for name in OPTIMIZERS:
        own = found[name]
        assert own["apart"] < 0.01, name  # rounding may turn the sign of a tiny gradient


def test_neither_an_update_nor_a_refresh_waits_for_each_parameter(found: dict[str, Any]) -> None:
    for name in OPTIMIZERS:
        own = found[name]
        for part, syncs in (("update", 1), ("refresh", 4)):
            few, many = own[f"{part} 1"], own[f"{part} 4"]
            assert (few["sync"], few.get("to device")) == (many["sync"], many.get("to device")), name
            assert few["sync"] <= syncs, (name, part)
        assert "to device" not in own["update 4"]


def test_mixed_devices_are_an_error(found: dict[str, Any]) -> None:
    assert "all tensors to be on the same device" in found["mixed"]
