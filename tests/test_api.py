"""What a script or a notebook calls: plain rows, a model and a tokenizer of the user's own."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch
import toyjob

import cplus
from cplus import models
from cplus.data.examples import to_row
from cplus.toy import world

ROWS = [to_row(example) for example in world.taught("harbours")[:4]]
CLOZE = {"interface": "cloze"}

# What README, docs, examples and notebooks import, but for the laboratory's own pages (diagnostics, report, studies).
DOCUMENTED = {
    "cplus": "encode evaluation interfaces models optim protect",
    "cplus.cost": "Work",
    "cplus.data.encoded": "Encoded",
    "cplus.data.examples": "Example to_row",
    "cplus.data.readers": "read_file read_rows",
    "cplus.data.tasks": "load_task",
    "cplus.gates": "Elementwise Proposal",
    "cplus.integrations": "distributed",
    "cplus.integrations.jax_loop": "Loop restore save",
    "cplus.integrations.lm_eval": "run_tasks",
    "cplus.integrations.optax": "blend collaborative",
    "cplus.integrations.peft": "scope",
    "cplus.integrations.rows": "bank_rows encoded",
    "cplus.integrations.transformers": "PreservationCallback preserve",
    "cplus.interfaces": "build tokens_by_role",
    "cplus.job.plan": "plan",
    "cplus.loop": "EpochEnded Schedule adapt prepare",
    "cplus.losses": "answer_losses",
    "cplus.masters": "MasterAdamW",
    "cplus.methods": "BLEND METHODS Material Method Past",
    "cplus.models": "load",
    "cplus.models.identity": "fingerprint",
    "cplus.optim": "AdamW",
    "cplus.probes.bank": "Bank",
    "cplus.probes.build": "build",
    "cplus.probes.generate": "write_probes",
    "cplus.probes.settings": "ProbeSettings",
    "cplus.receipts.receipt": "ModelId Receipt RowComparison RowSet write_receipt",
    "cplus.repairing.model": "repair_model",
    "cplus.scoring": "predict",
    "cplus.toy": "rows world",
    "cplus.toy.rows": "main write",
    "cplus.toy.world": "examples prompt taught untaught",
}


def test_the_public_names_are_these() -> None:
    assert cplus.__all__ == [
        "METHODS", "AdaptConfig", "Guard", "Method", "RepairConfig", "adapt", "encode", "evaluate", "probe", "protect",
        "read", "receipt", "repair",
    ]  # fmt: skip
    assert all(hasattr(cplus, name) for name in cplus.__all__)


@pytest.mark.parametrize("path", DOCUMENTED)
def test_what_the_documentation_imports_is_there(path: str) -> None:
    for name in DOCUMENTED[path].split():
        if not hasattr(import_module(path), name):
            import_module(f"{path}.{name}")


def test_rows_are_read_from_files_tasks_dictionaries_and_examples(tmp_path: Path) -> None:
    examples = cplus.read(ROWS)
    assert [to_row(example) for example in examples] == ROWS
    assert cplus.read(examples) == examples
    path = tmp_path / "keep.jsonl"
    toyjob.write_rows(path, examples)
    assert cplus.read(path) == cplus.read(str(path)) == examples
    assert len(cplus.read("harbours")) == len(world.examples("harbours"))
    with pytest.raises(TypeError, match="all dictionaries or all examples, got dict"):
        cplus.read([ROWS[0], examples[1]])
    with pytest.raises(ValueError, match="row 2"):
        cplus.read([ROWS[0], {"nonsense": 1}])


def test_a_plain_loop_from_rows_to_a_protected_model(tmp_path: Path) -> None:
    base = models.load("toy-s", device="cpu")
    model, tokenizer = base.model.train(), base.tokenizer
    bank = cplus.probe(model, tokenizer, ROWS, num_probes=6, banks=tmp_path, **CLOZE)
    assert model.training, "the model is left in its own mode"
    assert len(bank.probes) == 6
    again = cplus.probe(model, tokenizer, ROWS, num_probes=6, banks=tmp_path, **CLOZE)
    assert again.manifest == bank.manifest, "the sealed bank is read, not written again"
    before = cplus.evaluate(model, tokenizer, ROWS, **CLOZE)
    assert repr(before) == f"Evaluation({sum(p.right for p in before.predictions)} of 4 right)"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    anchors = cplus.encode(ROWS, tokenizer, **CLOZE)
    probes = cplus.encode(bank.examples, tokenizer, **CLOZE)
    guard = cplus.protect(optimizer, model, anchors=anchors, probes=probes)
    guard.refresh()
    [row] = cplus.encode([to_row(world.untaught("harbours")[0])], tokenizer, **CLOZE)
    ids = torch.tensor([[*row.prompt, *row.target]])
    labels = torch.tensor([[*[-100] * len(row.prompt), *row.target]])
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    assert guard.steps == 1


def test_a_finished_jobs_receipt_is_read(tmp_path: Path) -> None:
    toyjob.write_files(tmp_path)
    done = cplus.adapt(toyjob.asked(tmp_path, model="toy-s", epochs=1))
    found = cplus.receipt(done.folder)
    assert found.method == "cplus"
    assert {rows.name for rows in found.sets} >= {"new", "past"}
