"""The small things that a user meets in the first hour."""

from __future__ import annotations

import shutil
from html import escape

import pytest
import yaml
from toyjob import asked, write_files

import cplus
from cplus import toy
from cplus.jobs.folder import FinishedJob
from cplus.receipts.page import read_receipt
from cplus.receipts.verdict import headline, of_figures

pytestmark = pytest.mark.usefixtures("one_thread", "cache")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> FinishedJob:
    """A job from a folder whose model card names the model it comes from."""
    folder = tmp_path_factory.mktemp("job")
    write_files(folder)
    base = shutil.copytree(toy.folder("toy"), folder / "base")
    (base / "README.md").write_text("---\nbase_model: owner/tiny\nlicense: mit\n---\n\n# Tiny\n", encoding="utf-8")
    return cplus.adapt(asked(folder, model=str(base), method="sft", epochs=2, evaluate_rows=64))


def test_a_notebook_shows_a_job_as_a_small_table(job: FinishedJob) -> None:
    shown, figures = job._repr_html_(), job.record["figures"]
    assert escape(headline(figures)) in shown
    assert str(job.folder / "receipt.html") in shown
    past = next(own for own in figures["sets"] if own["name"] == "past")
    for when in ("before", "after"):
        assert f">{past[when]['percent']:.1f} %<" in shown
    receipt = read_receipt(job.folder)
    assert len(repr(receipt)) < len(str(job.folder)) + 160
    assert len(shown) < 4000
    assert "<script" not in of_figures("<script>", figures, {"<script>": "<script>"})


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
