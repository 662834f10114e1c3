"""The notebooks run from the first cell to the last, and show their results well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_compile_and_hold_no_outputs(path: Path) -> None:
    for cell in cells(path, "code"):
        lines = [line for line in "".join(cell["source"]).splitlines() if not line.startswith("%")]
        compile("\n".join(lines), path.name, "exec")
        assert (cell["outputs"], cell["execution_count"]) == ([], None), "clear the outputs before committing"


def executed(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The code cells with their outputs."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1500, resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def seen(cells: list[dict[str, Any]]) -> tuple[list[str], int, int]:
    """The tables, the number of figures, and the largest number of lines that a cell printed."""
    outputs = [output for cell in cells for output in cell["outputs"]]
    data = [output["data"] for output in outputs if "data" in output]
    tables = [one["text/html"] for one in data if "<table>" in one.get("text/html", "")]
    return tables, sum("image/png" in one for one in data), max(_lines(cell["outputs"]) for cell in cells)


def _lines(outputs: list[dict[str, Any]]) -> int:
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return sum(text.count("\n") + 1 for text in texts if text.strip())


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "tables", "longest"), [("quickstart", 3, 40), ("your_model", 1, 60)])
def test_it_runs_and_shows_its_jobs_and_repairs_as_tables(
    name: str, tables: int, longest: int, packaged_folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "your_model":
        packaged_folder("smollm2-135m")
    else:
        monkeypatch.setenv("CPLUS_CACHE", str(tmp_path / "cache"))
    found, figures, lines = seen(executed(ROOT / "examples" / f"{name}.ipynb", tmp_path, monkeypatch))
    assert (len(found), figures) == (tables, 1)
    assert lines < longest
