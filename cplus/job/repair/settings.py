"""The settings of `cplus repair`: those of a job that concern rows, probes and evaluation, and its own."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from cplus.job.settings import AdaptConfig, Positive

SHARED = (
    "new", "anchors", "keep", "past", "validation", "external", "external_limit", "interface", "plain",
    "chat_template", "turns", "thinking", "columns", "own_answers", "judge", "max_new_tokens", "max_length",
    "too_long", "data_dir", "bank", "num_probes", "shots", "temperature", "topics", "compute_dtype", "seed", "out",
    "max_asked", "require", "save_dtype", "checkpoint_minutes", "device", "revision", "trust_remote_code",
)  # fmt: skip
"""The settings of a job that a repair uses too."""
MAX_ROWS = 256
"""Past rows, and new rows, that importance is computed from by default."""
OWN = ("tuned", "tolerance", "rounds", "max_rows")


class RepairConfig(AdaptConfig):
    """Everything that decides a repair: `model` is the base; settings of the training are refused."""

    tuned: str = Field(
        description="The model fine-tuned from the base: alias, hub id, folder, GGUF file or folder of a LoRA adapter."
    )
    tolerance: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of what was learned that may be given up: of Acquisition (default 0.01: 1 point), or of the "
        "fall of the new loss (default 0.05).",
    )
    rounds: Positive = Field(
        1, description="Rounds; each one after the first computes the importance of the new rows anew."
    )
    max_rows: Positive = Field(
        MAX_ROWS,
        description="Maximum number of past rows, and of new rows, for the importance and the search.",
    )
    validation: str | None = Field("none", description="New rows that were not trained on, to keep as well: a file.")

    @model_validator(mode="after")
    def _no_training(self) -> RepairConfig:
        if self.anchors is None and not self.written:
            raise ValueError("a repair needs rows the base model should keep; provide anchors, or leave out keep none")
        foreign = [name for name in self.model_fields_set if name not in {"model", *SHARED, *OWN}]
        if changed := [n for n in foreign if getattr(self, n) != type(self).model_fields[n].default]:
            raise ValueError(f"a repair trains nothing, so it has no use for {changed[0]}; leave it out")
        return self

    def shown(self) -> dict[str, Any]:
        """The settings that matter for a repair, as JSON."""
        return {"method": "repair", **self.model_dump(mode="json", include={"model", *OWN, *SHARED})}


def repair_settings(values: dict[str, Any], *, where: str = "settings") -> RepairConfig:
    """Check values against the schema; every fault is named."""
    try:
        return RepairConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
