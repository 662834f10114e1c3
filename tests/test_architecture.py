"""The layers hold, each equation has one home, and nothing heavy is imported by the command line's help."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cplus"

# A module imports only from lower layers, or from its own package. The longest matching name counts.
LAYERS = {
    "algorithm": 0,
    "files": 0,
    "locks": 0,
    "watch": 0,
    "imports": 0,
    "terminal": 0,
    "cost": 0,
    "ranks": 0,
    "predictions": 0,
    "records": 0.5,
    "native": 0.4,
    "kernels": 0.5,
    "optim": 0.6,
    "data": 1,
    "projections": 1,
    "adapters": 1,
    "losses": 1.2,
    "interfaces": 1.2,
    "gates": 1.2,
    "toy": 1.3,
    "evaluation": 1.3,
    "evaluation.task": 2.4,
    "report": 1.4,
    "models": 1.5,
    "tasks": 1.6,
    "scoring": 2,
    "evidence": 2,
    "support": 2,
    "attach": 2.2,
    "objectives": 2.2,
    "probes": 2.5,
    "methods": 3,
    "selection": 3.1,
    "loop": 3.2,
    "diagnostics": 3.4,
    "costs": 3.4,
    "integrations": 3.4,
    "config": 4,
    "experiment": 4.5,
    "parting": 4.8,
    "setting": 4.9,
    "run": 5,
    "sequence": 5.1,
    "jobs": 5.2,
    "api": 5.2,
    "ledger": 5.3,
    "studies": 5.4,
    "report.studies": 5.5,
    "commands": 6,
    "cli": 7,
    "__main__": 8,
}
FACADE = "__init__"


def modules() -> list[tuple[str, Path]]:
    return [(str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."), path) for path in PACKAGE.rglob("*.py")]


def imports(path: Path) -> set[str]:
    """Names of cplus modules imported anywhere in the file, `cplus.` dropped."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cplus":
            names = [node.module.removeprefix("cplus").removeprefix(".")]
            found |= {n or alias.name for n in names for alias in node.names}
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("cplus.") for a in node.names if a.name.startswith("cplus.")}
    return found


def layer(module: str) -> float:
    """The layer of the longest name in the table that begins the module's name."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in LAYERS:
            return LAYERS[name]
    raise AssertionError(f"{module} has no layer: add it to LAYERS and to docs/architecture.md")


@pytest.mark.parametrize(("module", "path"), modules(), ids=[name for name, _ in modules()])
def test_a_module_imports_only_from_lower_layers(module: str, path: Path) -> None:
    if module == FACADE:
        return
    for other in imports(path):
        if other.split(".")[0] == module.split(".")[0]:
            continue
        assert layer(other) < layer(module), f"{module} imports {other} from the same or a higher layer"


def test_reports_never_import_torch() -> None:
    code = "import sys, cplus.report.studies, cplus.records, cplus.selection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, cplus.cli as c; c.register(); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def claims(kind: str) -> Counter[int]:
    """How often each equation or algorithm line is claimed by a `Paper:` tag."""
    found: Counter[int] = Counter()
    for _, path in modules():
        for tag in re.findall(r"Paper: (.*)", path.read_text()):
            for part in tag.split(";"):
                if kind == "equation":
                    found.update(int(n) for n in re.findall(r"Eq\. (\d+)", part))
                elif match := re.search(r"Algorithm 1, lines? ([\d, -]+)", part):
                    for piece in re.findall(r"(\d+)(?:-(\d+))?", match[1]):
                        found.update(range(int(piece[0]), int(piece[1] or piece[0]) + 1))
    return found


def test_each_equation_has_exactly_one_home() -> None:
    assert claims("equation") == Counter(range(1, 8))


def test_each_line_of_the_algorithm_has_exactly_one_home() -> None:
    assert claims("line") == Counter(range(1, 18))


def test_the_paper_map_names_every_claim_where_it_stands() -> None:
    text = (ROOT / "docs" / "paper_map.md").read_text()
    rows = re.findall(
        r"^\| (Eq\. \d+|Algorithm 1, lines? [\d, -]+) \|.*?\| `cplus/([\w/]+)\.py` `(\w+)` \|$", text, re.M
    )
    assert rows
    for claim, module, name in rows:
        source = (PACKAGE / f"{module}.py").read_text()
        homes = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        ]
        assert any(claim.removeprefix("Algorithm 1, ") in (ast.get_docstring(node) or "") for node in homes), claim
    named = {int(n) for claim, _, _ in rows for n in re.findall(r"Eq\. (\d+)", claim)}
    assert named == set(range(1, 8))


def test_the_core_is_short() -> None:
    assert len((PACKAGE / "algorithm.py").read_text().splitlines()) <= 125
