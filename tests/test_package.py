"""What is published is whole: every data file is in the wheel, and all files name one version."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from cplus import __version__, models
from cplus.base.environment import OLDEST

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def tracked(folder: str) -> set[str]:
    """The files under version control in a folder; without git, all that are not compiled."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    found = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path.relative_to(ROOT)) for path in found}


def test_the_wheel_holds_every_module_and_data_file_and_its_licence(tmp_path: Path) -> None:
    source = tmp_path / "source"  # setuptools leaves a folder of its own where it builds
    for name in sorted(tracked("cplus") | {"pyproject.toml", "README.md", "LICENSE"}):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    code = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    build = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True, check=True)
    wheel = zipfile.ZipFile(tmp_path / done.stdout.split()[-1])
    packed = {name for name in wheel.namelist() if name.startswith("cplus/")}
    assert packed == tracked("cplus"), "package-data in pyproject.toml, or an __init__.py, is missing"
    assert {"cplus/py.typed", "cplus/core/gate.cpp"} < packed
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert wheel.getinfo(next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))).file_size


def test_all_files_name_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    newest = re.search(r"^## .*?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert {PROJECT["project"]["version"], citation["version"], newest[1]} == {__version__}


def test_links_of_root_pages_lead_to_files() -> None:
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "README.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()):
            assert link.startswith("https://") or (ROOT / link).exists(), link


IMPORT = """
import sys, time
import torch, transformers
transformers.Trainer  # what a fine-tuning script imports itself
transformers.AutoTokenizer.from_pretrained(sys.argv[1])
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
print(model(torch.tensor([[5, 6, 7]])).logits.sum().item())
began, before = time.process_time(), set(sys.modules)
import cplus
cplus.protect
from cplus.integrations.transformers import preserve
spent = time.process_time() - began
added = {name.partition(".")[0] for name in set(sys.modules) - before}
print(spent, *sorted(added - sys.stdlib_module_names))
"""


def test_a_saved_model_needs_no_cplus_and_protect_is_imported_in_two_seconds_beyond_torch_and_transformers(
    tiny_llama: Any, tmp_path: Path
) -> None:
    models.save(tiny_llama.model, tiny_llama.tokenizer, tmp_path / "out")
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    logits, spent, *added = done.stdout.split()
    assert float(logits) == pytest.approx(tiny_llama.model(torch.tensor([[5, 6, 7]])).logits.sum().item(), abs=1e-4)
    assert added == ["cplus", "rich"]  # so the model was loaded without cplus; transformers requires rich too
    assert float(spent) < 2.0  # processor time, so that a busy machine changes nothing


def test_the_matrix_of_environments_names_what_pyproject_allows() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    import matrix

    sys.path.remove(str(ROOT / "tools"))
    allowed = dict(re.findall(r"^(\w+)>=([\d.]+)$", "\n".join(PROJECT["project"]["dependencies"]), re.M))
    assert matrix.ENVIRONMENTS["oldest"].pins == (f"transformers=={allowed['transformers']}.0",)
    assert f"transformers=={allowed['transformers']}" in matrix.ENVIRONMENTS["lowest"].pins
    assert matrix.ENVIRONMENTS["lowest"].torch == f"{allowed['torch']}.0"
    assert len(matrix.ENVIRONMENTS) >= 3
    extras = PROJECT["project"]["optional-dependencies"].values()
    stated = [*PROJECT["project"]["dependencies"], *(entry for extra in extras for entry in extra)]
    for name, oldest in OLDEST.items():  # what protect and preserve refuse is what an installation refuses
        assert {entry for entry in stated if entry.startswith(f"{name}>")} == {f"{name}>={oldest}"}
    assert all((ROOT / path).is_file() for path in matrix.CONTRACT)
