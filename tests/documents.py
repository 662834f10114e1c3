"""The code blocks of the documentation, and how they are run: in order, in one folder, as a reader would paste them.

`python`, `bash` and `diff` blocks are run; other languages are shown only, and a block without a language is an error.
A comment on the line before a block says otherwise:

    <!-- not run: it needs a GPU -->     shown only, with the reason
    <!-- run: long -->                   run by `make test-long`
    <!-- exit code: 0 or 2 -->           both are right; without it only 0 is
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cplus.cli.app import app

ROOT = Path(__file__).parent.parent
RUN = ("python", "bash", "diff")
SHOWN = ("text", "json", "bibtex")
COMMAND = re.compile(r"^\s*(?:\$ )?(?:cplus|pip|python|make|torchrun|accelerate|sbatch) ")
MARK = re.compile(r"^ *<!-- (not run|run|exit code): (.+) -->$")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and "not run" not in self.marks

    @property
    def long(self) -> bool:
        return self.marks.get("run") == "long"


def blocks(page: Path) -> list[Block]:
    """The page's fenced blocks, without their indentation."""
    lines, found, at = page.read_text(encoding="utf-8").splitlines(), [], 0
    while at < len(lines):
        opened = re.match(r"^( *)(`{3,})(\S*)\s*$", lines[at])
        if opened:
            end = next(i for i in range(at + 1, len(lines)) if lines[i].strip() == opened[2])
            text = textwrap.dedent("\n".join(lines[at + 1 : end])) + "\n"
            found.append(Block(page=page, line=at + 1, language=opened[3], text=text, marks=_marks(lines, at)))
            at = end
        at += 1
    return found


def _marks(lines: list[str], at: int) -> dict[str, str]:
    marks = {}
    while at > 0 and (match := MARK.match(lines[at - 1])):
        marks[match[1]], at = match[2], at - 1
    return marks


def outside(page: Path) -> list[str]:
    """The page's lines that are in no fenced block."""
    inside, kept = "", []
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = re.match(r"^ *(`{3,})", line)
        if fence and (not inside or inside == line.strip()):
            inside = "" if inside else fence[1]
        elif not inside:
            kept.append(line)
    return kept


def words(page: Path) -> int:
    """The number of words outside code blocks."""
    return len(re.findall(r"\w+", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)))


def patched(diff: str) -> str:
    """What a diff leaves behind."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-")) + "\n"


def before(diff: str) -> str:
    """What a diff starts from."""
    return "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+")) + "\n"


def commands(text: str) -> list[str]:
    """The lines of a shell block, each with its continuations, without comments."""
    joined = [line for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return [line for line in joined if not line.lstrip().startswith("#")]


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block in the current folder; Python blocks of a page share their names."""
    if block.language != "bash":
        text = patched(block.text) if block.language == "diff" else block.text
        exec(compile("\n" * block.line + text, str(block.page), "exec"), names)
        return
    allowed = [int(code) for code in block.marks.get("exit code", "0").split(" or ")]
    lines = commands(block.text)
    for command in lines if all(map(simple, lines)) else ["\n".join(lines)]:
        code, output = (_here if simple(command) else _shell)(command)
        assert code in allowed, f"{block}: {command}\nexit code {code}\n{output}"


def simple(command: str) -> bool:
    """Whether a line is one call of ours, which need not import torch again in another process.

    >>> simple("cplus adapt toy --require 'retention>=0.9'  # one call"), simple("cplus methods > a.txt")
    (True, False)
    """
    words = list(shlex.shlex(command, posix=True, punctuation_chars=True))
    ours = words[0] == "cplus" or command.startswith("python -m cplus.")
    return ours and not any(set(word) <= set("();<>|&") for word in words)


def _here(command: str) -> tuple[int, str]:
    words = shlex.split(command, comments=True)
    if words[0] == "python":
        return _module(words[2:])
    done = CliRunner().invoke(app, words[1:])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        return 1, f"{done.output}\n{done.exception!r}"
    return done.exit_code, done.output


def _shell(script: str) -> tuple[int, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(["bash", "-ec", script], env=environment, capture_output=True, text=True, check=False)
    return ran.returncode, ran.stdout + ran.stderr


def _module(words: list[str]) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_module(words[0], run_name="__main__")
        except SystemExit as stop:
            return int(bool(stop.code)), str(stop.code)
    return 0, ""
