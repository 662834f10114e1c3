"""The small things that a user meets in the first hour, each with the tests that hold it."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from html import escape
from pathlib import Path

import pytest
import yaml
from toyjob import asked, write_files

import cplus
from cplus import toy
from cplus.job.run import FinishedJob
from cplus.receipts.contents import RowSet
from cplus.receipts.receipt import read_receipt
from cplus.receipts.verdict import headline

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

HELD_BY = {
    "progress without a terminal": "test_terminal.py::test_a_long_bar_prints_a_line_every_thirty_seconds",
    "audit finds the anchors": "test_probes_audit.py::test_the_command_finds_the_anchors_beside_the_bank",
    "audit tables fit 390 pixels": "test_probes_audit.py::test_the_tables_fit_a_phone",
    "misspelt names are refused at once": "test_cli.py::test_a_misspelt_name_is_refused_before_torch_is_imported",
    "--version": "test_cli.py::test_version",
    "other trainers' option names": "test_cli.py::test_other_trainers_options_are_answered_with_ours",
    "other trainers' names in a file": "test_cli.py::test_other_trainers_settings_are_answered_with_ours_in_a_file_too",
    "completion of method and task names": "test_cli.py::test_the_shell_completes_methods_tasks_and_models",
    "no traceback for an early Ctrl-C": "test_cli.py::test_an_early_interruption_is_one_word_and_exit_code_130",
    "no traceback while rows are read": "test_cli.py::test_an_interruption_while_reading_leaves_no_traceback",
    "short repr of a job": "test_first_hour.py::test_a_job_is_shown_in_one_line",
    "tables in a notebook": "test_first_hour.py::test_a_notebook_shows_a_job_and_its_receipt_as_small_tables",
    "one line of progress in a notebook": (
        "test_terminal.py::test_a_notebook_has_one_line_that_is_replaced_and_then_empty"
    ),
    "short repr of an evaluation": "test_api.py::test_a_plain_loop_from_rows_to_a_protected_model",
    "no ± for one seed": "test_demo.py::test_errors_are_shown_for_several_seeds_only",
    "no ± for one row": "test_receipt.py::test_one_row_has_a_loss_but_no_interval_and_no_plus_minus",
    "AdaptConfig's errors in our sentences": "test_config.py::test_what_is_wrong_is_said_in_a_sentence",
    "one kind of mean": "test_receipt.py::test_losses_and_their_rise_are_one_kind_of_mean",
    "full axes or a marked cut": "test_receipt.py::test_an_axis_that_does_not_begin_at_zero_is_marked",
    "the same rows behind curve and headline": "test_first_hour.py::test_the_curve_ends_where_the_headline_is",
    "the curve's first point has the later points' rows": (
        "test_job.py::test_free_form_rows_are_scored_by_likelihood_and_judged"
    ),
    "the card names the base model and its licence": "test_first_hour.py::test_the_card_names_the_base_and_its_licence",
    "a base in 4 bits with LoRA": "test_four_bit.py::test_a_job_trains_on_a_4_bit_base",
    "4 bits refused without the package": "test_four_bit.py::test_an_absent_package_is_named_before_anything_is_loaded",
    "saving in bfloat16 or float16": "test_job_finish.py::test_weights_are_written_in_the_precision_of_the_settings",
    "--max-length, with truncation by choice": "test_truncation.py::test_a_job_says_what_it_cut_or_left_out",
    "several --new with weights": "test_mixture.py::test_plan_record_and_resumed_job_agree_on_a_mixture",
    "a custom chat template": "test_job_finish.py::test_the_assistants_turns_train",
    "a broken chat template": (
        "test_job_finish.py::test_a_chat_template_that_is_missing_or_broken_is_refused_before_the_model_is_loaded"
    ),
    "--finish after a kill": "test_job_killed.py::test_finish_after_a_kill_writes_the_checkpoints_weights",
}  # fmt: skip


@pytest.mark.parametrize("thing", HELD_BY)
def test_each_has_its_test(thing: str) -> None:
    file, _, name = HELD_BY[thing].partition("::")
    tree = ast.parse(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A job from a folder whose model card names the model it comes from."""
    folder = tmp_path_factory.mktemp("job")
    write_files(folder)
    base = shutil.copytree(toy.folder("toy"), folder / "base")
    (base / "README.md").write_text("---\nbase_model: owner/tiny\nlicense: mit\n---\n\n# Tiny\n", encoding="utf-8")
    return cplus.adapt(asked(folder, model=str(base), method="sft", epochs=2, evaluate_rows=64))


def test_a_job_is_shown_in_one_line(job: FinishedJob) -> None:
    assert repr(job) == f"FinishedJob({str(job.folder)!r}: {headline(job.record['figures'])})"
    assert len(repr(job)) < len(str(job.folder)) + 160


def test_a_notebook_shows_a_job_and_its_receipt_as_small_tables(job: FinishedJob) -> None:
    shown, figures = job._repr_html_(), job.record["figures"]
    assert escape(headline(figures)) in shown
    assert str(job.folder / "receipt.html") in shown
    past = next(own for own in figures["sets"] if own["name"] == "past")
    for when in ("before", "after"):
        assert f">{past[when]['percent']:.1f} %<" in shown
    receipt = read_receipt(job.folder)
    rows = [[len(own.rows), *(own_counts(own, kind) for kind in ("kept", "lost"))] for own in receipt.sets]
    cells = [re.findall(r">(\d+)</td>", line) for line in receipt._repr_html_().split("<tr>")[2:]]
    assert [list(map(int, line[:3])) for line in cells] == rows
    assert len(repr(receipt)) < len(str(job.folder)) + 160
    assert max(len(shown), len(receipt._repr_html_())) < 4000
    hostile = dataclasses.replace(receipt, title="<script>alert(1)</script>")
    assert "<script" not in hostile._repr_html_()


def own_counts(own: RowSet, kind: str) -> int:
    return sum(row.kind == kind for row in own.rows)


def test_the_card_names_the_base_and_its_licence(job: FinishedJob) -> None:
    _, front, _ = (job.folder / "README.md").read_text(encoding="utf-8").split("---\n", 2)
    assert {name: yaml.safe_load(front)[name] for name in ("base_model", "license")} == {
        "base_model": "owner/tiny",
        "license": "mit",
    }


def test_the_curve_ends_where_the_headline_is(job: FinishedJob) -> None:
    """With all rows in every evaluation; with fewer, the receipt gives the number behind each point."""
    receipt, figures = read_receipt(job.folder), job.record["figures"]
    assert receipt.followed == {"new": 12, "past": 24}
    assert receipt.curve[-1].acquisition == pytest.approx(figures["acquisition"]["percent"])
    assert receipt.curve[-1].retention == pytest.approx(figures["retention"]["percent"])
    assert "Rows behind each point: new 12, past 24" in (job.folder / "receipt.html").read_text(encoding="utf-8")
    assert json.loads((job.folder / "receipt.json").read_text())["figures"] == figures
