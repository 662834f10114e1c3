"""The size of the project: each figure has a ceiling, and ceilings only ever fall.

Lower a ceiling with the figure. Of the reserve for the verdict, the frontier at equal cost and named abilities (1,200
lines of code, 8 modules, 6 options, 1,500 lines of tests) the options and all but 3 modules are used; new code is paid
for by removal.
"""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest
import typer.main

from cplus.cli import app

ROOT = Path(__file__).parent.parent
CEILINGS = {
    "code lines": 22_105,
    "code lines outside lab": 17_483,
    "code lines in core": 1_856,
    "modules": 146,
    "entries": 15,
    "verbs": 16,
    "options of adapt": 28,
    "options": 118,
    "test lines": 22_331,
    "code lines beside the package": 2_541,
}
BESIDE = ("benchmarks", "tools", "examples")
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank line, comment or docstring."""
    text = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    held = {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node) is not None:
            held.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(held)


def options(command: object, name: str = "") -> dict[str, int]:
    """The number of options of each verb."""
    subs = getattr(command, "commands", None)
    if subs:
        return {verb: count for key, sub in subs.items() for verb, count in options(sub, f"{name} {key}").items()}
    shown = [p for p in command.params if p.param_type_name == "option" and not p.hidden and p.name != "help"]  # type: ignore[attr-defined]
    return {} if getattr(command, "hidden", False) else {name.strip(): len(shown)}


@pytest.fixture(scope="module")
def house() -> dict[str, int]:
    files = list((ROOT / "cplus").rglob("*.py"))
    code = {path: code_lines(path) for path in files}
    if not app.app.registered_commands:
        app.register()
    verbs = options(typer.main.get_command(app.app))
    return {
        "code lines": sum(code.values()),
        "code lines outside lab": sum(count for path, count in code.items() if path.parent.name != "lab"),
        "code lines in core": sum(count for path, count in code.items() if path.parent.name == "core"),
        "modules": len(files),
        "entries": len({path.relative_to(ROOT / "cplus").parts[0] for path in files} - {"__init__.py", "__main__.py"}),
        "verbs": len(verbs),
        "options of adapt": verbs["adapt"],
        "options": sum(verbs.values()),
        "code lines beside the package": sum(
            code_lines(path) for folder in BESIDE for path in (ROOT / folder).rglob("*.py")
        ),
        "test lines": sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")),
    }


@pytest.mark.parametrize("name", CEILINGS)
def test_the_house_is_no_larger_than_its_ceiling(house: dict[str, int], name: str) -> None:
    assert house[name] <= CEILINGS[name], f"{name}: {house[name]:,}, ceiling {CEILINGS[name]:,}; remove as much first"
