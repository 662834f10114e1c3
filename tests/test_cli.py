"""The command line: its names are frozen, misspelt ones are refused at once, and Ctrl-C leaves no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cplus.cli import options
from cplus.cli.app import app
from cplus.jobs.settings import AdaptConfig, settings
from cplus.methods.table import METHODS

SURFACE = Path(__file__).parent / "data" / "cli.txt"


def surface() -> str:
    """Every command with its arguments and options, one a line."""

    def walk(command: Any, name: str) -> list[str]:
        if hasattr(command, "commands"):
            return [line for inner in command.commands.values() for line in walk(inner, f"{name} {inner.name}")]
        own = [" / ".join((*p.opts, *p.secondary_opts)) for p in command.params]
        return [name, *(f"{name} {option}" for option in own)]

    return "\n".join(sorted(walk(typer.main.get_command(app), "cplus"))) + "\n"


def test_commands_and_options_are_the_ones_that_are_written_down() -> None:
    changed = set(surface().splitlines()) ^ set(SURFACE.read_text().splitlines())
    assert not changed, f"{sorted(changed)}; if this is meant: python {Path(__file__).relative_to(Path.cwd())}"


MISSPELT = (
    ("study run chat --scale desk-real --seeds 100", "seed 100 chose the level and the rates, so it cannot report"),
    ("adapt toyy --new harbours --anchors harbours", "unknown model 'toyy'; did you mean toy"),
    ("adapt toy --set split=harbors", "unknown task 'harbors'; did you mean harbours?"),
    ("adapt toy --new harbours --set external=arc_eazy", "unknown task 'arc_eazy'; did you mean arc_easy or"),
    ("adapt toy --new harbours --past nothere.jsonl", "nothere.jsonl"),
    ("adapt toy --set split=harbours --method cpluss", "unknown method 'cpluss'; did you mean cplus"),
    ("adapt toy --set split=harbours --interface leter", "'leter' is not one of 'letter', 'cloze', 'freeform'"),
    ("adapt toy --set split=harbours --set preset=paper --method cpluss", "unknown method 'cpluss'"),
    ("adapt toy --new harbours --set chat_template=no.jinja", "no.jinja: expected a file with a chat template"),
    ("adapt toy --new harbours --set chat_template=bad.jinja", "bad.jinja:2: expected a file with a chat template in"),
    ("adapt toy --new harbours --set chat_template=run.yaml", "run.yaml: expected a chat template, but it never"),
    ("adapt --config run.yaml", "unknown method 'slt'; did you mean stm, sft"),
    ("update ledger --model toyy --new harbours", "unknown model 'toyy'"),
    ("evaluate toy --task harbors", "unknown task 'harbors'; did you mean harbours?"),
    ("evaluate toyy --task harbours", "unknown model 'toyy'"),
    ("evaluate toy --task harbours --interface leter", "'leter' is not one of"),
    ("repair toyy toy --new harbours --anchors harbours", "unknown model 'toyy'"),
    ("repair toy ./nothere --new harbours --anchors harbours", "./nothere: there is no such model folder"),
    ("repair toy toy-l --new harbors --anchors harbours", "unknown task 'harbors'; did you mean harbours?"),
    ("repair toy toy-l --new harbours --set keep=none", "a repair needs rows the base model should keep"),
    ("evaluate ./nothere --task harbours", "./nothere: there is no such model folder"),
    ("probe toy --task harbors", "unknown task 'harbors'"),
    ("probe nothere.gguf --task harbours", "there is no such GGUF file"),
    ("probe audit bank --against harbors", "unknown task 'harbors'"),
    ("demo --methods sft,cpluss", "unknown method 'cpluss'"),
)
EACH = """
import json, os, sys
from cplus.cli.app import main
assert not {"torch", "transformers"} & set(sys.modules), "the command line's help needs neither"
for number, command in enumerate(json.loads(sys.argv[1])):
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        continue
    os.dup2(os.open(f"{number}.err", os.O_WRONLY | os.O_CREAT), 2)
    code, sys.argv = 0, ["cplus", *command.split()]
    try:
        main()
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os._exit(99 if {"torch", "transformers"} & set(sys.modules) else code)
"""


def test_a_misspelt_name_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: toy\nsplit: harbours\nmethod: slt\n")
    (tmp_path / "bad.jinja").write_text("{% for m in messages %}\n{{ m.content }\n{% endfor %}")
    line = [sys.executable, "-c", EACH, json.dumps([command for command, _ in MISSPELT])]
    done = subprocess.run(
        line, capture_output=True, text=True, check=True, cwd=tmp_path, env={**os.environ, "COLUMNS": "200"}
    )
    for number, ((command, sentence), code) in enumerate(zip(MISSPELT, done.stdout.split(), strict=True)):
        assert code in "12", f"{command}: {code}"
        assert sentence in (tmp_path / f"{number}.err").read_text(), command


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("adapt toy --learning-rate 1e-5", "there is no option --learning-rate; did you mean --lr?"),
        ("adapt toy --num-train-epochs=3", "--num-train-epochs; did you mean --epochs?"),
        ("adapt toy --num_train_epochs=3", "--num_train_epochs; did you mean --epochs?"),
        ("adapt toy --per-device-train-batch-size 4", "did you mean --batch-size?"),
        ("adapt toy --output-dir out", "did you mean --out?"),
        ("adapt toy --train-file a.jsonl", "did you mean --new?"),
        ("adapt toy --dataset a.jsonl", "did you mean --new?"),
        ("adapt --model-name-or-path toy", "give the model as an argument"),
        ("adapt --model toy", "give the model as an argument"),
        ("adapt --resume-from-checkpoint out", "did you mean --resume?"),
        ("update ledger --learning-rate 1", "--learning-rate is set by: --set lr=VALUE"),
        ("update ledger --base-model toy", "did you mean --model?"),
        ("evaluate --model toy", "give the model as an argument"),
        ("evaluate toy --learning-rate 1", "No such option: --learning-rate"),  # it has no such setting
        ("adapt toy --plann", "there is no option --plann; did you mean --plan?"),
        ("adapt toy --metod=cplus", "there is no option --metod; did you mean --method?"),
        ("adapt toy --shot 4", "there is no option --shot; did you mean --set shots=VALUE?"),
        ("export out --jsn", "there is no option --jsn; did you mean --json?"),
        ("adpt toy", "No such command 'adpt'. Did you mean 'adapt'?"),
        ("study rn e01", "No such command 'rn'. Did you mean 'run'?"),
        ("probe audt bank", "No such command 'audt'. Did you mean 'audit'?"),
        ("adapt toy --shots 4", "--shots is set by: --set shots=4"),
        ("adapt toy --shots=4", "--shots is set by: --set shots=4"),
        ("adapt toy --plain --new a", "--plain is set by: --set plain=true"),
        ("adapt toy --no-plain", "--no-plain is set by: --set plain=false"),
        ("repair toy toy --max-rows 2", "--max-rows is set by: --set max_rows=2"),
        ("probe toy --min-yield 0.1", "--min-yield is set by: --set min_yield=0.1"),
        ("probe --verify bank", "any more; use cplus probe audit BANK"),
        ("study run e01 --executor slurm", "there is no option --executor any more; --slurm NAME=VALUE"),
        ("audit bank", "any more; use cplus probe audit BANK"),
        ("split toy", "any more; use cplus evaluate MODEL --task TASK --split FILE"),
        ("config --schema", "any more; use cplus adapt --schema"),
        ("ledger show led", "any more; use cplus update LEDGER, with --show"),
        ("report", "any more; use cplus study report"),
        ("data list", "any more; use cplus study data"),
        ("preview toy", "use cplus adapt --plan"),
        ("study e03 --scale smoke", "any more; use cplus study run e03"),
    ],
)
def test_a_name_that_is_misspelt_old_or_another_trainers_is_answered_with_ours(command: str, hint: str) -> None:
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert hint in done.stderr


def test_without_arguments_the_first_command_is_shown() -> None:
    done = CliRunner().invoke(app, [], env={"COLUMNS": "200"})
    assert "Begin with 'cplus demo', or on your own rows: 'cplus adapt MODEL --new new.jsonl" in done.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("adapt toy --method cplus", {m for m in METHODS if m.startswith("cplus")}),
        ("adapt toy --new harb", {"harbours"}),
        ("probe toy --task gsm", {"gsm8k"}),
        ("evaluate toy --task gsm", {"gsm8k"}),
        ("evaluate smol", {"smollm2-135m"}),
        ("evaluate toy --interface cl", {"cloze"}),
        ("adapt toy --set gradient_ch", {"gradient_checkpointing="}),
        ("adapt toy --set external=arc_e", {"external=arc_easy", "external=arc_easy_train"}),
        ("repair toy toy --set save_dtype=b", {"save_dtype=bfloat16"}),
        ("evaluate toy --set plain=", {"plain=true", "plain=false"}),
        ("evaluate toy --set micro", set()),
        ("update led --set out", set()),  # an update sets it itself
    ],
)
def test_the_shell_completes_names_of_models_tasks_methods_and_settings(words: str, offered: set[str]) -> None:
    """What bash would offer for the last of these words."""
    asked = {
        "_CPLUS_COMPLETE": "complete_bash",
        "COMP_WORDS": f"cplus {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    done = CliRunner().invoke(app, [], prog_name="cplus", env=asked)
    assert set(done.stdout.split()) == offered


def chosen(*words: str) -> dict[str, Any]:
    """The settings that a job would have."""
    found: dict[str, Any] = {}

    @options.with_settings(("new", "lr", "repair"), AdaptConfig.model_fields)
    def command(**given: Any) -> None:
        found.update(options.given(given))

    only = typer.Typer()
    only.command(cls=options.Command)(command)
    done = CliRunner().invoke(only, list(words), catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.stderr
    return found


def test_set_takes_every_setting_as_its_own_option_would() -> None:
    assert chosen("--set", "repair=true") == chosen("--repair")
    assert chosen("--set", "new=a", "--set", "new=b=0.5", "--new", "c") == {"new": ["c", "a", "b=0.5"]}
    assert chosen("--set", "columns=prompt=q,response=a") == {"columns": "prompt=q,response=a"}
    asked = settings({"model": "toy", "new": "a", **chosen("--set", "shots=4", "--set", "external=b")})
    assert (asked.shots, asked.external) == (4, ("b",))


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("shot=4", r"'shot' is not a setting; did you mean shots\?"),
        ("learning_rate=1", r"'learning_rate' is not a setting; did you mean lr\?"),
        ("xyz=1", "'xyz' is not a setting; 'cplus adapt --schema' lists all settings"),
        ("plain", "expected NAME=VALUE, as in --set order=file, got --set plain"),
        ("lr=2", "expected one value of lr, got 1.0 and 2"),
    ],
)
def test_a_setting_that_set_cannot_read_is_refused_in_one_sentence(word: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        chosen("--lr", "1", "--set", word)


def test_a_value_given_by_set_is_refused_by_the_schema() -> None:
    for command, refusal in (
        ("adapt toy --new harbours --set shots=-1", "settings: shots must be"),
        ("evaluate toy --task harbours --set epochs=1", "'epochs' is not a setting"),
    ):
        assert str(CliRunner().invoke(app, command.split()).exception).startswith(refusal)


WAITING = """
import builtins, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
real = builtins.__import__
def importing(name, *rest, **more):
    if name == {module!r}:
        os.kill(os.getpid(), signal.SIGINT)
    return real(name, *rest, **more)
builtins.__import__ = importing
from cplus.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_early_interruption_is_one_word_and_exit_code_130(module: str) -> None:
    """Ctrl-C arrives while this module is being imported."""
    command = [sys.executable, "-c", WAITING.format(module=module), "evaluate", "toy", "--task", "harbours"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_locale_without_utf_8_prints_what_it_can_and_escapes_the_rest() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment["COLUMNS"] = "40"  # too narrow for some words, which end in an ellipsis then
    command = [sys.executable, "-m", "cplus", "adapt", "--help"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0
    assert done.stderr == b""
    assert rb"\u2026" in done.stdout


def test_a_job_goes_on_when_the_reader_of_its_log_goes_away(here: Path) -> None:
    """`cplus adapt ... 2>&1 | head -0`: every line that it prints breaks the pipe."""
    given = "toy-s --new new.jsonl --anchors keep.jsonl --interface cloze --epochs 1 --lr 1e-3 --out out --json"
    command = [sys.executable, "-m", "cplus", "adapt", *given.split(), "--method", "sft"]
    reader, writer = os.pipe()
    with subprocess.Popen(command, cwd=here, stdout=writer, stderr=writer) as job:
        os.close(writer)
        os.close(reader)
    assert job.returncode == 0
    assert (here / "out" / "model" / "model.safetensors").exists()
    assert (here / "out" / "receipt.html").exists()


if __name__ == "__main__":
    SURFACE.write_text(surface())
    print(f"wrote {SURFACE}")
