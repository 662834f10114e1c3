"""CPLUS inside axolotl. In the YAML, with this folder on PYTHONPATH:

plugins: [axolotl_plugin.CplusPlugin]
cplus_anchors: keep.jsonl       # {prompt, response} or {messages}
cplus_bank: banks/mine          # optional; made by `cplus probe` for the same base model
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from cplus.models.identity import fingerprint
from pydantic import BaseModel

import cplus
from cplus import interfaces
from cplus.data.readers import read_file
from cplus.integrations.transformers import preserve
from cplus.probes.bank import Bank


class CplusArgs(BaseModel):
    """The plugin's keys in the YAML."""

    cplus_anchors: str
    cplus_bank: str | None = None


class CplusPlugin(BasePlugin):  # type: ignore[misc]
    """Checks the bank against the base model, then puts the gate on the trainer."""

    bank: Bank | None = None

    def get_input_args(self) -> str:
        """Where axolotl finds the keys."""
        return f"{__name__}.CplusArgs"

    def post_model_build(self, cfg: Any, model: Any) -> None:
        """Before adapters are added: the bank must have been written by this very model."""
        if cfg.cplus_bank:
            self.bank = Bank.load(cfg.cplus_bank, model_fingerprint=fingerprint(model))

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """The trainer is there: hand it the evidence."""
        tokenizer = trainer.processing_class
        anchors = cplus.encode(read_file(Path(cfg.cplus_anchors)), tokenizer)
        interface = interfaces.build("freeform", tokenizer)
        probes = [interface.encode(example) for example in self.bank.examples] if self.bank else []
        preserve(trainer, anchors=anchors, probes=probes)
