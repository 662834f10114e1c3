"""One schema for the command line, YAML and Python."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from cplus.cli.app import app
from cplus.jobs import settings
from cplus.training.loop import build_scheduler
from cplus.training.settings import Lora

ROOT = Path(__file__).parent.parent
LEAST = {"model": "toy", "new": "a.jsonl"}


def test_the_example_says_every_setting_and_its_default() -> None:
    text = (ROOT / "examples" / "adapt.yaml").read_text()
    given = yaml.safe_load(text)
    read = settings.settings(given)
    names = set(settings.AdaptConfig.model_fields)
    for name, field in settings.AdaptConfig.model_fields.items():
        assert f"\n# {field.description}\n{name}:" in text or f"\n# {field.description}\n# {name}:" in text
    plain = settings.settings({"model": "smollm2-135m", "new": "new.jsonl"})
    differ = {name for name in names if getattr(read, name) != getattr(plain, name)}
    assert differ == {"anchors", "past"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epoch": 3}, "'epoch' is not a setting; did you mean epochs?"),
        ({"learning_rate": 1e-5}, "'learning_rate' is not a setting; did you mean lr?"),
        ({"zzz": 3}, "'zzz' is not a setting; 'cplus adapt --schema' lists"),
        ({"lr": -1}, "lr: expected a learning rate above 0, got -1"),
        ({"lr": float("nan")}, "lr: expected a learning rate above 0"),
        ({"order": "random"}, "order must be 'shuffled' or 'file', got 'random'"),
        ({"lora": "16"}, "lora: expected r=16 or r=16,alpha=32"),
        ({"lora": "r=16,rank=3"}, "'lora.rank' is not a setting"),
        ({"require": ["forgetting<=0.1"]}, "expected retention>=SHARE or acquisition>=SHARE"),
        ({"require": ["retention>=90"]}, "got 'retention>=90'"),
        ({"split": "harbours"}, "either new (rows to learn) or split"),
        ({"new": None}, "either new (rows to learn) or split"),
        ({"new": None, "split": "harbours", "anchors": "b.jsonl"}, "split draws anchors and past rows itself"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^run\.yaml: ") as error:
        settings.settings({**LEAST, **changes}, where="run.yaml")
    assert sentence in str(error.value)
    with pytest.raises(ValueError, match=r"^(?!run)") as built:
        settings.AdaptConfig(**{**LEAST, **changes})
    assert f"run.yaml: {built.value}" == str(error.value)
    assert not isinstance(built.value, ValidationError)


def test_a_preset_stands_below_what_is_given() -> None:
    paper = settings.settings({**LEAST, "preset": "paper", "beta": 0.5})
    assert (paper.batch_size, paper.order, paper.lr, paper.epochs, paper.weight_decay) == (1, "file", 1e-6, 25, 0.1)
    assert (paper.num_probes, paper.stop, paper.clip_norm, paper.beta) == (512, "never", 0.0, 0.5)
    for model in ("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct"):  # by alias and by hub id
        assert settings.settings({**LEAST, "preset": "paper", "model": model}).lr == 1e-5
    assert settings.settings(paper.model_dump(mode="json")) == paper


def test_lora_reads_text_and_mappings_alike() -> None:
    text = settings.settings({**LEAST, "lora": "r=4,alpha=8,merge=false"}).lora
    assert text == settings.settings({**LEAST, "lora": {"r": 4, "alpha": 8, "merge": False}}).lora
    assert text == Lora(r=4, alpha=8, merge=False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "") for text in ("- a\n- b\n", "a: [", "", "1: 2\n", "!!python/object/apply:os.system ['true']")),
        ("lr: 1\nlr: 2\n", "got 'lr' 2 times"),  # of two values the first would be dropped in silence
        ("new: &a [b, b]\npast: [*a, *a]\n", r"not an alias \(\*\)"),  # aliases of aliases unfold to gigabytes
    ],
)
def test_a_file_that_is_no_list_of_settings_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"run\.yaml: expected .*{problem}"):
        settings.read_yaml(tmp_path / "run.yaml")


def test_numbers_without_a_point_are_read_as_yaml_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: toy\nnew: a.jsonl\nlr: 1e-6\n")  # YAML 1.1 calls this a text
    assert settings.settings(settings.read_yaml(path)).lr == 1e-6


def test_the_command_prints_the_schema() -> None:
    schema = CliRunner().invoke(app, ["adapt", "--schema"])
    assert schema.exit_code == 0
    assert '"additionalProperties": false' in schema.stdout


def test_a_jobs_rate_rises_over_a_tenth_of_its_updates() -> None:
    def rising(**changes: object) -> int:
        config = settings.settings({**LEAST, "epochs": 5, "batch_size": 1, "lr": 1.0, **changes})
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = build_scheduler(config, optimizer, 8)  # 40 updates
        return sum(scheduler.lr_lambdas[0](step) < 1 for step in range(40))

    assert rising() == 4
    assert rising(warmup_steps=0) == rising(preset="paper") == 0
    assert rising(warmup_steps=7) == 7
