"""Every row of the table x every setting of a method: an effect on the weights, or a refusal that names both."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny
import toyjob
from test_adapt import same, train
from torch import nn

from cplus.jobs.prepare import row_of
from cplus.jobs.settings import AdaptConfig
from cplus.methods.table import METHODS, configured
from cplus.training.loop import Schedule
from cplus.training.settings import RunSpec

VALUES: dict[str, Any] = {"anchor_weight": 0.9, "beta": 0.5, "parts": 2, "refresh": 2, "memory": 0.25, "strength": 0.35}
OWN_VALUES: dict[tuple[str, str], Any] = {("strength", "stm"): 1e3}
"""A row's own value where the common one changes nothing: at random weights every perplexity is above 2.5."""
BLENDED = {
    "cplus", "norm-matched", "shuffled", "constant-label", "balanced-label", "cplus-no-ema", "cplus-norm-aligned",
    "cplus-cvar", "cplus-rotating", "cplus-remembering", "cplus-gradient", "replay-cplus", "ssu",
    "cplus-repair", "cplus-curvature", "divergence-cplus",
}  # fmt: skip
FROM_BANK = BLENDED | {"cplus-probes"}
EVIDENCE = FROM_BANK | {"cpl", "cplus-anchors", "agem", "ogd"}
USES = {
    "anchor_weight": BLENDED,
    "beta": (BLENDED | {"cplus-anchors", "cplus-probes"})
    - {"cplus-no-ema", "cplus-gradient", "ssu", "cplus-curvature"},
    "parts": FROM_BANK,
    "refresh": EVIDENCE,
    "memory": EVIDENCE - {"ogd", "ssu", "cplus-curvature"},
    "strength": {
        "distillation", "probe-distillation", "kl-base", "asft", "eaft", "talr", "stm", "flow", "ewc", "freeze-layers",
        "mofo", "ssu", "wise-ft", "cplus-curvature", "self-replay", "divergence", "divergence-cplus",
    },
}  # fmt: skip
"""Which rows each setting acts on; a row that drops one must be taken out here, in the open."""
BANK_USERS = FROM_BANK | {"probe-replay", "anchor-probe-replay", "ssr", "probe-distillation", "sft-repair"}
BANK_USERS |= {"self-replay", "divergence"}


TWO = Schedule(epochs=2, batch_size=4, order="shuffled")


@cache
def plain(name: str) -> nn.Module:
    """The row trained as it is."""
    return train(METHODS[name], "adamw", tiny.material(), TWO)[0]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("setting", VALUES)
def test_a_setting_acts_or_is_refused(name: str, setting: str) -> None:
    row, given = METHODS[name], {setting: OWN_VALUES.get((setting, name), VALUES[setting])}
    if name not in USES[setting]:
        with pytest.raises(ValueError, match=f"method '{name}' has no use for {setting}: .*; leave it out, or choose"):
            configured(row, **given)
        return
    assert not same(plain(name), train(configured(row, **given), "adamw", tiny.material(), TWO)[0])


@pytest.mark.parametrize("setting", VALUES)
def test_a_studys_spec_hands_its_settings_on(setting: str) -> None:
    given: Any = {"model": "m", "task": "t", "interface": "cloze", "seed": 0, "num_anchors": 4, "num_probes": 8}
    for name in METHODS:
        spec = RunSpec(method=name, **given, **{setting: VALUES[setting]})
        if name not in USES[setting]:
            with pytest.raises(ValueError, match=f"'{name}' has no use for {setting}"):
                _ = spec.settings.row
            continue
        row = spec.settings.row
        shown = row.evidence[0][0] if setting == "anchor_weight" else getattr(row, setting)
        assert shown == VALUES[setting]


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.adapter is None])
def test_a_jobs_settings_act_or_are_refused(name: str, tmp_path: Path) -> None:
    toyjob.write_files(tmp_path)
    own = {setting: VALUES[setting] for setting in ("anchor_weight", "beta", "strength")}
    of_banks = {"bank": "b", "num_probes": 9, "shots": 3, "temperature": 0.5, "topics": True}
    for setting, value in (own | of_banks).items():
        config = toyjob.asked(tmp_path, method=name, **{setting: value})
        if name not in USES.get(setting, BANK_USERS):
            with pytest.raises(ValueError, match=f"'{name}' has no use for {setting}"):
                row_of(config)
        elif setting in own:
            small = {"ema": "uint8"} if METHODS[name].beta or setting == "beta" else {}
            assert row_of(config) == configured(METHODS[name], **{setting: value}, **small)
        else:
            assert row_of(config).needs_bank


def test_without_settings_a_row_is_itself(tmp_path: Path) -> None:
    toyjob.write_files(tmp_path)
    for name, row in METHODS.items():
        assert configured(row) == row
        if row.adapter is None:
            config = AdaptConfig(model="toy", new=str(tmp_path / "new.jsonl"), preset="paper", method=name)
            assert row_of(config) == row


def test_weights_of_the_blend_are_the_settings() -> None:
    row = configured(METHODS["constant-label"], anchor_weight=0.75)
    assert row.evidence == ((0.75, "anchors"), (0.25, "constant"))


def test_a_jobs_average_takes_a_byte_per_parameter_and_may_take_more(tmp_path: Path) -> None:
    toyjob.write_files(tmp_path)
    for given, kind in (("bfloat16", "bfloat16"), ("float32", "float32"), (None, "uint8")):
        gate: Any = row_of(toyjob.asked(tmp_path, method="cplus", ema=given)).build_gate(0)
        assert gate.average.kind == kind
    with pytest.raises(ValueError, match="'sft' has no use for ema: it smooths no mask"):
        row_of(toyjob.asked(tmp_path, method="sft", ema=kind))


def test_the_gates_smoothing_is_the_rows() -> None:
    for row in METHODS.values():
        if row.beta is None:
            continue
        gate: Any = configured(row, beta=0.25).build_gate(0)
        while hasattr(gate, "inner"):
            gate = gate.inner
        assert gate.average.beta == 0.25
