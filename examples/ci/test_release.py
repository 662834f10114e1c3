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
    command = [
        sys.executable,
        "-m",
        "cplus",
        "check",
        os.environ["BASE"],
        os.environ["TUNED"],
        "--json",
        "--out",
        "check",
    ]
    for ability, points in MOST_LOST.items():
        command += ["--require", f"{ability}>=-{points}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode in (0, 2), "cplus check failed; its message is above"
    return json.loads(done.stdout)


@pytest.mark.parametrize("ability", MOST_LOST)
def test_release_keeps(checked, ability):
    [found] = [one for one in checked["requirements"] if one["metric"] == ability]
    lost = [one["missed"] for one in checked["lines"] if one["name"] == ability]
    assert found["met"], f"{ability}: its lower bound is {found['bound']}; lost: {lost}; see check/receipt.html"
