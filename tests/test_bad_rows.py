"""Files that cannot be learned from: `cplus adapt` names the row and the remedy in one sentence, before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app

pytestmark = pytest.mark.usefixtures("one_thread", "cache")
GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
FIRST = {"messages": [{"role": "assistant", "content": "Hello."}, *GOOD["messages"]]}
USER_FIRST = "{% if messages[0].role == 'assistant' %}{{ raise_exception('Roles must alternate') }}{% endif %}"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory, make_tiny: Any) -> Path:
    """Tiny models as folders: one whose template wants the user first, one without a template."""
    folder = tmp_path_factory.mktemp("bases")
    for name, family in (("chat", "gemma2"), ("base", "llama")):
        own = make_tiny(family)
        own.tokenizer.chat_template = f"{USER_FIRST}{own.tokenizer.chat_template}" if name == "chat" else None
        models.save(own.model, own.tokenizer, folder / name)
    return folder


@pytest.mark.parametrize(
    ("base", "rows", "sentence"),
    [
        ("chat", [{"words": "a"}], "new.jsonl:1: expected the keys .* found words; map others with columns"),
        ("chat", [GOOD, FIRST], r"new.*2: the chat template refuses this conversation of assistant, user, assistant"),
        ("base", [GOOD], "expected a tokenizer with a chat template, but .* has none; .*--set plain=true"),
        ("chat", [GOOD], r"below 25%; rejected: .*\(general\): give rows with --anchors FILE"),
    ],
    ids=["no format", "assistant first", "no template", "only rubbish"],
)
def test_a_bad_file_is_refused_in_one_sentence(
    bases: Path, tmp_path: Path, base: str, rows: list[Any], sentence: str
) -> None:
    (tmp_path / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    given = ["adapt", str(bases / base), "--new", str(tmp_path / "new.jsonl"), "--out", str(out), "--device", "cpu"]
    with pytest.raises(ValueError, match=sentence) as refused:
        CliRunner().invoke(app, given, catch_exceptions=False)
    assert "\n" not in str(refused.value)
    assert not out.exists()
