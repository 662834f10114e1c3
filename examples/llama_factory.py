"""CPLUS inside LLaMA-Factory: its training run with our callback.

python examples/llama_factory.py qwen3_full_sft.yaml keep.jsonl
"""

from __future__ import annotations

import sys
from pathlib import Path

import yaml
from llamafactory.train.tuner import run_exp
from transformers import AutoTokenizer

import cplus
from cplus.data.readers import read_file
from cplus.integrations.transformers import PreservationCallback


def main(recipe: str, keep: str) -> None:
    """Run the recipe and keep what the rows of `keep` show."""
    args = yaml.safe_load(Path(recipe).read_text())
    tokenizer = AutoTokenizer.from_pretrained(args["model_name_or_path"])
    anchors = cplus.encode(read_file(Path(keep)), tokenizer)
    run_exp(args, callbacks=[PreservationCallback(anchors=anchors)])


if __name__ == "__main__":
    main(*sys.argv[1:])
