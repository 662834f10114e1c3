"""The layers hold, each equation has one home, and the pages say where."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cplus"

PACKAGES = [
    "base", "core", "distributed", "data", "toy", "models", "evaluation", "probes", "methods", "training", "receipts",
    "jobs", "integrations", "lab", "cli",
]  # fmt: skip
"""Lowest first, as in docs/architecture.md. A module imports from its own package or one before it."""
FACADE = "__init__"


@cache
def modules() -> list[tuple[str, Path]]:
    return [(str(path.relative_to(PACKAGE).with_suffix("")).replace("/", "."), path) for path in PACKAGE.rglob("*.py")]


@cache
def tree(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> set[str]:
    """The cplus modules that a file imports anywhere, inside functions and for types alone included."""
    known, found = dict(modules()), set()
    for node in tree(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cplus":
            package = node.module.removeprefix("cplus").removeprefix(".")
            for alias in node.names:
                inner = f"{package}.{alias.name}".removeprefix(".")
                found.add(inner if inner in known or f"{inner}.__init__" in known else package)
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("cplus.") for a in node.names if a.name.startswith("cplus.")}
    return {f"{name}.__init__" if f"{name}.__init__" in known else name for name in found if name}


def test_a_module_imports_only_from_its_own_package_or_one_before_it() -> None:
    for module, path in modules():
        for other in imports(path) - {FACADE} if "." in module else ():
            package, mine = other.split(".")[0], module.split(".")[0]
            assert PACKAGES.index(package) <= PACKAGES.index(mine), f"{module} imports {other} from a later package"


def test_no_import_cycle_of_any_kind() -> None:
    """Package by package too: imports inside a package, inside functions and for types alone all count."""
    order = graphlib.TopologicalSorter({module: imports(path) - {module} for module, path in modules()})
    try:
        order.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def claims(kind: str) -> Counter[int]:
    """How often each equation or algorithm line is claimed by a `Paper:` tag."""
    found: Counter[int] = Counter()
    for _, path in modules():
        for part in ";".join(re.findall(r"Paper: (.*)", path.read_text())).split(";"):
            if kind == "equation":
                found.update(int(n) for n in re.findall(r"Eq\. (\d+)", part))
            elif match := re.search(r"Algorithm 1, lines? ([\d, -]+)", part):
                for piece in re.findall(r"(\d+)(?:-(\d+))?", match[1]):
                    found.update(range(int(piece[0]), int(piece[1] or piece[0]) + 1))
    return found


def test_each_equation_and_each_line_of_the_algorithm_has_exactly_one_home() -> None:
    assert claims("equation") == Counter(range(1, 8))
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


ITEMS = (ROOT / "tests" / "data" / "paper_items.txt").read_text().splitlines()
"""The paper's figures, tables and appendix experiments in the order of its source, each with its label or title."""


def test_the_paper_map_has_a_row_with_command_and_drawing_for_every_item_of_the_paper() -> None:
    from cplus.lab import STUDIES

    text = (ROOT / "docs" / "paper_map.md").read_text()
    rows = {
        item: (command, file, function)
        for item, command, file, function in re.findall(
            r"^\| ((?:Fig\.|Table|App\.) [\w.]+) \| [^|]+ \| ([^|]+) \| `([\w/.]+)` `(\w+)` \|$", text, re.M
        )
    }
    assert set(rows) == {item.split(": ")[0] for item in ITEMS}
    for item, (command, file, function) in rows.items():
        named = re.findall(r"`(e\d\d)`", command)
        assert all(name in STUDIES for name in named), item
        assert named or item in ("Fig. 2", "Table 2")  # the overview and the index need no run
        assert f"def {function}(" in (ROOT / file).read_text(), item


def test_the_list_of_the_papers_items_is_that_of_its_source() -> None:
    source = ROOT.parent / "shared" / "paper" / "cplus.tex"
    if not source.is_file():
        pytest.skip("no source of the paper in ../shared/paper")
    text = re.sub(r"(?<!\\)%.*", "", source.read_text())
    labels = re.findall(r"\\label\{((?:fig|tab):[^}]+)\}", text)
    appendix = text[text.index("\\appendix") :]
    found, letter, number = list(labels), "", 0
    for kind, title in re.findall(r"\\(section|subsection)\{([^}]*)\}", appendix):
        letter, number = (chr(ord(letter or "@") + 1), 0) if kind == "section" else (letter, number + 1)
        if kind == "subsection":
            found.append(f"App. {letter}.{number}: {title}")
    assert [item if item.startswith("App.") else item.split(": ", 1)[1] for item in ITEMS] == found


def test_the_architecture_page_names_files_that_exist_and_the_packages_in_order() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^\| (\d+) \| .+ \| `(cplus/[\w/]+\.py)` \|$", text, re.M)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert steps
    for name in re.findall(r"`(cplus/[\w/]+\.py)`", text):
        assert (ROOT / name).is_file(), name
    assert re.findall(r"^\| `(\w+)/` \|", text, re.M) == PACKAGES
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(PACKAGES)


def callers(module: str, name: str) -> set[str]:
    """The modules that import a name from a module of ours."""
    return {
        other
        for other, path in modules()
        for node in tree(path)
        if isinstance(node, ast.ImportFrom)
        and node.module == f"cplus.{module}"
        and name in {alias.name for alias in node.names}
    }


def test_every_training_goes_through_one_driver_and_every_bank_through_one_cache() -> None:
    assert callers("training.loop", "adapt") == {"training.driver"}
    assert callers("training.rows", "material") == {"training.driver"}
    assert callers("training.driver", "begin") == {"lab.runs", "lab.sequence", "jobs.adapt", "jobs.compare"}
    assert callers("probes.build", "build") == {"cli.probe"}
    assert callers("training.loop", "build_scheduler") == {"training.driver"}
