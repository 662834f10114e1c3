"""Every small fault in the gate's arithmetic must fail a test: `python benchmarks/mutants.py --out mutants.json`.

The faults are those of cosmic-ray (operators, comparisons, numbers, loops, decorators) and of mutmut (arguments,
assignments, branches). Neither's own runner serves here: one starts Python and torch anew for each of two thousand
mutants, the other wraps functions so that they no longer compile. So each mutant is tested in a fork of one process
that has torch loaded and this package not. The sources tested are a copy; the working tree is never touched.

Survivors that change no number are listed with the reason in `mutants.toml`; any other makes the exit code 1.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_suffix(".toml")
CORE = Path("cplus/core")
TESTS = {  # in this order, until the first failure
    "algorithm": ("tests/test_algorithm.py", "cplus/core/algorithm.py"),
    "gates": ("tests/test_gates.py",),
    "kernels": ("tests/test_kernels.py", "cplus/core/kernels.py"),
}
LOADED = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "transformers", "datasets", "hypothesis")
QUIET = ("-x", "-p", "no:cacheprovider", "--tb=line", "--durations=0")
BITWISE = frozenset(("RShift", "LShift", "BitOr", "BitAnd", "BitXor"))
OUTCOMES = {0: "survived", 1: "killed", 2: "killed"}  # of pytest: all passed, some failed, not even collected
BROKEN = 70  # no code of pytest's
Name: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed source, named by what stood where and what stands there now."""

    module: str
    where: str
    was: str
    now: str
    source: str

    @property
    def name(self) -> Name:
        """What makes it the same mutant in another version of the file."""
        return self.module, self.where, self.was, self.now


def by_cosmic_ray(source: str) -> Iterator[str]:
    """Changed sources by the operators of cosmic-ray."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    for name in plugins.operator_names():
        if name in ("core/VariableReplacer", "core/VariableInserter"):
            continue  # they want a name to put in
        if "BinaryOperator" in name and len(BITWISE.intersection(name.split("_"))) == 1:
            continue  # a float has no bits: such a mutant raises an error at once
        operator = plugins.get_operator(name)()
        places = sum(len(list(operator.mutation_positions(node))) for node in ast_nodes(get_ast(source)))
        for place in range(places):
            yield mutate_code(source, operator, place)


def by_mutmut(source: str) -> Iterator[str]:
    """Changed sources by the operators of mutmut, but for the words of strings."""
    import libcst
    from mutmut.mutation.mutators import mutation_operators, operator_string

    module = libcst.parse_module(source)
    nodes: list[libcst.CSTNode] = [module]
    while nodes:
        node = nodes.pop()
        nodes += [child for child in node.children if not isinstance(child, libcst.Annotation)]
        for kind, operator in mutation_operators:
            if isinstance(node, kind) and operator is not operator_string:
                for changed in operator(node):
                    found = module.deep_replace(node, changed)
                    assert isinstance(found, libcst.Module)
                    yield found.code


def meaning(source: str) -> str | None:
    """What Python runs of a source: no annotations, which are never evaluated; None where it does not parse."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
    return ast.dump(tree)


def scope(tree: ast.Module, line: int) -> str:
    """The innermost function or class around a line, decorators included, by its dotted name."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and min([node.lineno, *(d.lineno for d in node.decorator_list)]) <= line <= (node.end_lineno or 0)
    ]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))


def place(tree: ast.Module, lines: Sequence[str], at: int) -> str:
    """The scope of a line, numbered where the same line stands in it more than once."""
    where = scope(tree, at + 1)
    before = [i for i in range(at) if lines[i] == lines[at] and scope(tree, i + 1) == where]
    return f"{where} ({len(before) + 1})" if before else where


def mutants(module: str, source: str) -> list[Mutant]:
    """All different mutants of a module, from the top of the file down."""
    tree, lines, seen, found = ast.parse(source), source.splitlines(), {meaning(source), None}, []
    for changed in (*by_cosmic_ray(source), *by_mutmut(source)):
        means = meaning(changed)
        if means in seen:
            continue
        seen.add(means)
        edits = difflib.SequenceMatcher(None, lines, now := changed.splitlines(), autojunk=False).get_opcodes()
        [(_, first, last, begin, end)] = [edit for edit in edits if edit[0] != "equal"]
        first += next(i for i, line in enumerate(lines[first:last]) if line)
        was, new = (" ".join(line.strip() for line in part) for part in (lines[first:last], now[begin:end]))
        found.append((first, Mutant(module=module, where=place(tree, lines, first), was=was, now=new, source=changed)))
    return [mutant for _, mutant in sorted(found, key=lambda pair: pair[0])]


def tested(folder: Path, module: str, source: str, *, seconds: float) -> str:
    """What the module's tests say of this source: survived, killed or too slow."""
    (folder / CORE / f"{module}.py").write_text(source)
    child = os.fork()
    if child == 0:
        in_child(folder, module)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code >= 0 and code not in OUTCOMES:
                raise RuntimeError(
                    f"pytest ended with {code}, which is no verdict: {(folder / 'log').read_text()[-2000:]}"
                )
            return OUTCOMES.get(code, "killed")  # a process that a signal ended is a mutant killed
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "too slow"


def in_child(folder: Path, module: str) -> None:
    """Run the tests on the copy and end with pytest's code; this process never returns from here."""
    import pytest

    code = BROKEN
    try:
        with (folder / "log").open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        found = importlib.util.find_spec("cplus")
        if found is not None and found.origin == str(folder / "cplus" / "__init__.py"):
            code = int(pytest.main([*QUIET, *TESTS[module]]))
            sys.stdout.flush()
    finally:
        os._exit(code)


def allowed() -> dict[Name, str]:
    """The survivors that change no number, with the reason."""
    listed = tomllib.loads(ALLOWED.read_text())
    return {
        (module, entry["where"], entry["was"], now): entry["why"]
        for module, entries in listed.items()
        for entry in entries
        for now in entry["now"]
    }


def prepare(folder: Path) -> None:
    """Load what all forks share, on one thread, and keep compiled kernels inside the folder."""
    settings = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    os.environ.update(settings, TORCHINDUCTOR_CACHE_DIR=str(folder / "kernels"), CPLUS_CACHE=str(folder / "cache"))
    sys.dont_write_bytecode = True
    clean = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for part in ("cplus", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=clean)
    shutil.copy(ROOT / "pyproject.toml", folder)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    for name in LOADED:
        importlib.import_module(name)
    import pytest
    from hypothesis import settings as examples

    # No deadline: on a busy machine it would kill mutants that no test kills.
    examples.register_profile("mutants", derandomize=True, database=None, deadline=None)
    examples.load_profile("mutants")
    (folder / "test_nothing.py").write_text("def test_nothing() -> None:\n    pass\n")
    if pytest.main([*QUIET, "test_nothing.py"]) != 0:  # loads the plugins; tests/conftest.py would load the package
        raise RuntimeError("pytest does not run here")
    assert "cplus" not in sys.modules
    gc.freeze()  # what is never read again is never copied either


def tried(folder: Path, module: str, chosen: Sequence[Mutant]) -> Iterator[tuple[Mutant, str]]:
    """Each chosen mutant of a module and what became of it."""
    source, begun = (ROOT / CORE / f"{module}.py").read_text(), time.monotonic()
    sys.dont_write_bytecode = False
    if tested(folder, module, source, seconds=3600) != "survived":
        raise RuntimeError(f"the tests of {module} fail without any mutation: {(folder / 'log').read_text()[-2000:]}")
    # The bytecode of all other files is kept for speed; mutants of one second and one size would share theirs.
    sys.dont_write_bytecode = True
    for kept in (folder / CORE / "__pycache__").glob(f"{module}.*"):
        kept.unlink()
    seconds = 60 + 5 * (time.monotonic() - begun)  # an endless loop is a killed mutant, a busy machine is not
    for mutant in chosen:
        yield mutant, tested(folder, module, mutant.source, seconds=seconds)
    (folder / CORE / f"{module}.py").write_text(source)


def judged(folder: Path, module: str, *, listed: bool) -> dict[str, int]:
    """A module's counts; what should not be is printed: an unlisted survivor, or a listed mutant that a test kills."""
    begun, counts, fine = time.perf_counter(), Counter[str](), allowed()
    found = mutants(module, (ROOT / CORE / f"{module}.py").read_text())
    known = [mutant.name in fine for mutant in found]
    counts["mutants"], counts["equivalent"] = len(found), sum(known)
    chosen = [mutant for mutant, is_known in zip(found, known, strict=True) if is_known == listed]
    for mutant, outcome in tried(folder, module, chosen):
        counts[outcome] += 1
        if (outcome == "survived") != listed:
            print(f"{outcome}: {module}.{mutant.where}: {mutant.was}  ->  {mutant.now}", flush=True)
    return {**counts, "seconds": round(time.perf_counter() - begun)}


def main() -> int:
    """Try every mutant that is not listed, or every one that is, and write the counts."""
    options = argparse.ArgumentParser(description="Mutation testing of the gate's arithmetic.")
    options.add_argument("--modules", nargs="*", default=list(TESTS), choices=list(TESTS))
    options.add_argument("--listed", action="store_true", help="try those of mutants.toml alone: none may be killed")
    options.add_argument("--out", type=Path, help="the counts as JSON")
    asked = options.parse_args()
    out = None if asked.out is None else asked.out.resolve()
    rows: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="cplus-mutants-") as folder:
        prepare(Path(folder))
        for module in asked.modules:
            rows[module] = judged(Path(folder), module, listed=asked.listed)
            print(f"{module}: {rows[module]}", flush=True)
        os.chdir(ROOT)
    if out is not None:
        from cplus.base import files  # only now: the forks must not find it loaded

        files.write_json(out, rows)
    wrong = ("killed", "too slow") if asked.listed else ("survived",)
    return 1 if any(row.get(outcome) for row in rows.values() for outcome in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
