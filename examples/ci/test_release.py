"""Refuses a release that lost an ability: `BASE=... TUNED=... pytest test_release.py`.

Each is a folder, a hub id, a GGUF file, an adapter's folder, or the address of an OpenAI-compatible server, whose key
is read from CPLUS_API_KEY. What is tested is the lower 95 % bound of the change, not the change itself.
"""

import json
import os
import subprocess
import sys

import pytest

MOST_LOST = {"everyday": 12, "tools": 10, "json": 15, "stopping": 5}
"""Points of each ability that a release may have lost at most."""


@pytest.fixture(scope="session")
def checked():
    required = [word for name, points in MOST_LOST.items() for word in ("--require", f"{name}>=-{points}")]
    models = [os.environ["BASE"], os.environ["TUNED"]]
    command = [sys.executable, "-m", "cplus", "check", *models, *required, "--json", "--out", "check"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)  # exit code 2 if one is not met


@pytest.mark.parametrize("ability", MOST_LOST)
def test_release_keeps(checked, ability):
    [found] = [one for one in checked["requirements"] if one["metric"] == ability]
    assert found["met"], f"{ability}: its lower bound is {found['bound']}; see check/receipt.html"
