"""The suite under other arithmetic: `python benchmarks/portable.py`, or `make test-portable`.

One row is one run of all tests with other instructions or another number of threads. A row that has ended for this
commit is not run again, so that an interrupted matrix resumes with the same command. Exit code 1 where a row is red.
Rows are kept in `runs/portable.json` as they end; a whole matrix goes into `benchmarks/results/` and into the table of
`docs/robustness.md`.

An `ONEDNN_MAX_CPU_ISA` or `ATEN_CPU_CAPABILITY` that allows all the processor has changes nothing: each row says which
instructions torch chose, and one that repeats a native row instruction by instruction is filled in from it (`--fresh`
runs it all the same).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from cplus.base.files import read_json, write_json, write_text

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "portable.json"
LOGS = ROOT / "runs" / "portable"
PAGE = ROOT / "docs" / "robustness.md"
BEGIN, END = "<!-- portable -->\n", "<!-- /portable -->"
TIMEOUT = 1200  # seconds for a test: without vector instructions, or with threads in each other's way, all is slower
CHOICES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")  # unset unless the row sets them


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of the suite: how many threads a process has, and which instructions it may use."""

    threads: int
    instructions: Mapping[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Test processes at once: one per core, as in `make test`; threads that wait leave the cores to others."""
        return os.cpu_count() or 1

    def environment(self) -> dict[str, str]:
        """What the tests see; processes that tests start inherit it."""
        kept = {name: value for name, value in os.environ.items() if name not in CHOICES}
        waiting = {"OMP_WAIT_POLICY": "passive"} if self.threads > 1 else {}  # spinning starves a busy machine
        return {**kept, **waiting, **self.instructions, "OMP_NUM_THREADS": str(self.threads)}


ROWS = {
    "native-1": Row(threads=1),
    "native-2": Row(threads=2),
    "avx2-1": Row(threads=1, instructions={"ATEN_CPU_CAPABILITY": "avx2"}),
    "default-1": Row(threads=1, instructions={"ATEN_CPU_CAPABILITY": "default"}),
    "onednn-avx2-1": Row(threads=1, instructions={"ONEDNN_MAX_CPU_ISA": "AVX2"}),
}


def twin(name: str) -> str | None:
    """The native row that this one repeats on a processor without instructions beyond AVX2; None elsewhere."""
    row, native = ROWS[name], f"native-{ROWS[name].threads}"
    allows_all = row.instructions and all(value.lower() == "avx2" for value in row.instructions.values())
    return native if allows_all and capability(ROWS[native]) == "AVX2" else None


def counted(report: str) -> dict[str, Any]:
    """Passed, failed, skipped and the names of failures, from pytest's JUnit report.

    >>> case = '<testcase classname="tests.test_a" name="test_%s">%s</testcase>'
    >>> cases = case % ("x", "") + case % ("y[1]", "<failure/>") + case % ("z", "<skipped/>")
    >>> counted(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    {'passed': 1, 'failed': 1, 'skipped': 1, 'failures': ['tests/test_a.py::test_y[1]']}
    """
    outcomes: dict[str, str] = {}
    for case in ElementTree.fromstring(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:  # an error while tidying up makes a test that passed a failed one
            outcomes[name] = "failed"
        else:
            outcomes.setdefault(name, "skipped" if "skipped" in kinds else "passed")
    counts = {kind: sum(own == kind for own in outcomes.values()) for kind in ("passed", "failed", "skipped")}
    return {**counts, "failures": sorted(name for name, own in outcomes.items() if own == "failed")}


def run(row: Row, tests: Sequence[str], log: Path) -> dict[str, Any]:
    """One row: pytest in a process of its own, what it prints in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("w") as out:
        report = Path(folder) / "report.xml"
        options = ["--numprocesses", str(row.workers), f"--junitxml={report}", "-o", f"timeout={TIMEOUT}"]
        command = [sys.executable, "-m", "pytest", "-m", "", *options, *tests]
        done = subprocess.run(command, cwd=ROOT, env=row.environment(), stdout=out, stderr=out, check=False)
        found = counted(report.read_text()) if report.exists() else counted("<none/>")
    return {
        "threads": row.threads,
        "workers": row.workers,
        "instructions": dict(row.instructions),
        "capability": capability(row),
        **found,
        "code": done.returncode,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }


def capability(row: Row) -> str:
    """The instructions that torch's own kernels choose in this row."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    return subprocess.run(
        [sys.executable, "-c", code], env=row.environment(), capture_output=True, text=True, check=True
    ).stdout.strip()


def processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """What is tested: the commit, marked where files differ from it; results and pages are no part of the code."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs").strip()
    return git("rev-parse", "--short=12", "HEAD").strip() + ("+changes" if changed else "")


def green(found: Mapping[str, Any]) -> bool:
    """All tests of a row passed, and there were some."""
    return found["code"] == 0 and found["passed"] > 0


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The matrix as Markdown.

    >>> row = {"commit": "abc", "threads": 2, "capability": "AVX2", "passed": 9, "failed": 0, "skipped": 1}
    >>> print(table({"native-2": {**row, "minutes": 3.0, "code": 0, "failures": []}}).splitlines()[-1])
    | `native-2` | abc | 2 | AVX2 | 9 | 0 | 1 | 3.0 | |
    """
    if not rows:
        return "Not run yet.\n"
    lines = [
        "| row | commit | threads | torch's kernels | passed | failed | skipped | minutes | failures, notes |",
        "|" + "---|" * 9,
    ]
    for name, own in rows.items():
        failures = ", ".join(f"`{failure}`" for failure in own["failures"])
        if own["code"] and not failures:
            failures = f"pytest ended with code {own['code']}"
        if "same_as" in own:
            failures = f"the same instructions as `{own['same_as']}` on this processor"
        counts = ("commit", "threads", "capability", "passed", "failed", "skipped")
        cells = [f"`{name}`", *(str(own[key]) for key in counts)]
        lines.append(f"| {' | '.join([*cells, str(own['minutes'])])} | {failures}{' ' if failures else ''}|")
    return "\n".join(lines) + "\n"


def section(record: Mapping[str, Any]) -> str:
    """What stands between the markers of the page."""
    rows = record["rows"]
    head = f"Measured on {record['processor']}, {record['cores']} cores, torch {record['torch']}:\n\n" if rows else ""
    return f"\n{head}{table(rows)}\n"


def between(page: str) -> str:
    """What a page has between its markers."""
    return page.partition(BEGIN)[2].partition(END)[0]


def publish(record: Mapping[str, Any]) -> None:
    """Write a whole matrix where it is committed: the record, and its table on the page."""
    write_json(OUT, record)
    page = PAGE.read_text(encoding="utf-8")
    write_text(PAGE, page.replace(BEGIN + between(page) + END, BEGIN + section(record) + END))


def machine() -> dict[str, Any]:
    """Where the matrix was run."""
    from importlib.metadata import version

    return {"processor": processor(), "cores": os.cpu_count(), "torch": version("torch")}


def main() -> int:
    """Run what is missing, row by row."""
    options = argparse.ArgumentParser(description="Run the suite under other arithmetic.")
    options.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    options.add_argument("--tests", nargs="+", default=[], metavar="PATH", help="some tests instead of all")
    options.add_argument("--out", type=Path, help="the record; else under runs/")
    options.add_argument("--fresh", action="store_true", help="run rows again that have ended for this commit")
    asked = options.parse_args()
    out = asked.out or ROOT / "runs" / ("portable-some.json" if asked.tests else "portable.json")
    here = {"commit": commit(), "tests": asked.tests}
    old = read_json(out)["rows"] if out.exists() else {}
    rows = {name: own for name, own in old.items() if own["tests"] == asked.tests and name in ROWS}
    current = {name for name, own in rows.items() if here.items() <= own.items()}
    for name in asked.only:
        if name in current and green(rows[name]) and not asked.fresh and not here["commit"].endswith("+changes"):
            print(f"{name}: already there", flush=True)
            continue
        if not asked.fresh and (same := twin(name)) in rows and green(rows[str(same)]):
            rows[name] = {**rows[str(same)], "instructions": dict(ROWS[name].instructions), "same_as": same}
            write_json(out, {**machine(), "rows": rows})
            print(f"{name}: the same instructions as {same} on this processor", flush=True)
            continue
        row = ROWS[name]
        log = LOGS / f"{name}.log"
        print(f"{name}: {row.threads} threads, {row.workers} workers, {log}", flush=True)
        rows[name] = {**run(row, asked.tests, log), **here}
        rows = {each: rows[each] for each in ROWS if each in rows}
        write_json(out, {**machine(), "rows": rows})
        verdict = "green" if green(rows[name]) else "RED"
        print(f"{name}: {verdict}, {rows[name]['passed']} passed, {rows[name]['failed']} failed", flush=True)
    print(table(rows))
    if not asked.tests and asked.out is None and set(rows) == set(ROWS):
        publish(read_json(out))
    return 0 if all(green(rows[name]) for name in asked.only) else 1


if __name__ == "__main__":
    sys.exit(main())
