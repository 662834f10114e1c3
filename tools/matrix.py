"""Virtual environments with the versions that neighbours pin, and the guard's contract tests in each.

    python tools/matrix.py [NAME ...] [--folder runs/matrix]

An environment gets torch first and a constraint that keeps it, then its pins, then the tests. Each prints its row of
the table in docs/integrations.md; exit code 1 if a test of any of them fails. Without names, all environments are run
that have the torch of this one; the others need gigabytes of CUDA's packages.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("pytest>=9", "pytest-timeout>=2.3", "hypothesis>=6.150")
BASE = (
    "accelerate", "datasets", "peft", "trl", "scipy", "rich", "psutil", "typer", "pydantic", "PyYAML", "jinja2", "gguf",
)  # fmt: skip
CONTRACT = tuple(f"tests/test_{name}.py" for name in ("attach", "only_rows", "any_loss", "integration_trainer"))
SHOWN = ("transformers", "trl", "peft", "accelerate", "datasets", "torch")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The pins of one neighbour."""

    about: str
    pins: tuple[str, ...] = ()
    torch: str = ""
    """Another torch than the one that runs this file."""


def lower_bounds(*extras: str) -> tuple[str, ...]:
    """What pyproject.toml requires, each package at the oldest version that it allows; torch is installed by itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = {*project["dependencies"], *(e for extra in extras for e in project["optional-dependencies"][extra])}
    return tuple(sorted(entry.replace(">=", "==") for entry in stated if not entry.startswith("torch>")))


ENVIRONMENTS = {
    "lowest": Environment(
        about="every lower bound of `pyproject.toml`", pins=lower_bounds("data", "trl", "peft"), torch="2.8.0"
    ),
    "oldest": Environment(about="oldest transformers", pins=("transformers==5.4.0",)),
    "llama-factory": Environment(
        about="LLaMA-Factory 0.9.5's upper bounds",
        pins=("transformers==5.6.0", "accelerate==1.11.0", "datasets==4.0.0", "peft==0.18.1", "trl==0.24.0"),
    ),
    # TRL 1.15.0, the upper bound, computes SFT's loss with Triton alone, which CPU builds of torch do not have.
    "unsloth": Environment(
        about="Unsloth 2026.10.9's range", pins=("transformers==5.17.0", "trl==1.14.1", "datasets>=4.6,<5")
    ),
    "axolotl": Environment(
        about="axolotl 0.21's pins",
        pins=(
            "transformers==5.20.1",
            "tokenizers==0.23.3",
            "accelerate==1.15.0",
            "datasets==5.0.1",
            "peft==0.21.2",
            "trl==1.14.1",
            "pydantic==2.13.5",
            "typer==0.25.1",
        ),
    ),
    "newest": Environment(about="newest of everything", pins=("transformers",)),
    "newest-torch": Environment(about="newest of everything, torch too", pins=("transformers",), torch="2.15.0"),
}


def build(name: str, folder: Path) -> Path:
    """Create the environment, or find it: its interpreter."""
    place = folder / name
    python = place / "bin" / "python"
    if (place / "built").is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    torch = ENVIRONMENTS[name].torch or metadata.version("torch")  # the same build as ours, such as 2.13.0+cpu
    constraint = place / "constraints.txt"
    constraint.write_text(f"torch=={torch}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    pip += ["-c", str(constraint)]
    subprocess.run([*pip, "torch"], check=True)
    named = {re.split(r"[=<>]", pin)[0] for pin in ENVIRONMENTS[name].pins}
    subprocess.run([*pip, *ENVIRONMENTS[name].pins, *(b for b in BASE if b not in named), *TOOLS], check=True)
    (place / "built").write_text("")
    return python


def contract(python: Path) -> tuple[bool, str]:
    """Run the tests with this checkout; whether they pass, and their counts."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *CONTRACT]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:] if done.returncode else done.stdout[-300:], file=sys.stderr, flush=True)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", done.stdout.strip().splitlines()[-1])
    return done.returncode == 0, ", ".join(counts)


def main() -> int:
    """Build and test the named environments, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "matrix", help="where they are built")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"expected names of {', '.join(ENVIRONMENTS)}; got {', '.join(unknown)}")
    held = True
    for name in options.names or [name for name, own in ENVIRONMENTS.items() if not own.torch]:
        python = build(name, options.folder)
        fine, counts = contract(python)
        held &= fine
        listed = subprocess.run([str(python), "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
        versions = dict(line.split("==") for line in listed.splitlines() if "==" in line)
        shown = " | ".join(versions.get(package, "-") for package in SHOWN)
        print(f"| {ENVIRONMENTS[name].about} | {shown} | {counts} |", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
