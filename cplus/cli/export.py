"""`cplus export`: a model folder as one GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from cplus.base.terminal import console, print_json
from cplus.cli.options import Json


def export(
    folder: Annotated[Path, typer.Argument(help="A model folder, or a job's folder: its model is exported.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; model.gguf in the folder by default.")] = None,
    dtype: Annotated[Literal["float16", "float32"], typer.Option(help="How matrices are stored.")] = "float16",
    json: Json = False,
) -> None:
    """Write a model as one GGUF file for llama.cpp, Ollama or LM Studio, with its tokenizer and chat template."""
    model = folder / "model" if (folder / "model" / "config.json").exists() else folder
    target = out or folder / "model.gguf"
    if target.exists():
        raise ValueError(f"{target} exists already; choose another --out, or remove it")

    from cplus.models.exporting import write_gguf

    found = write_gguf(model, target, dtype)
    if json:
        print_json(found)
        return
    console.print(
        f"{target}: {found['architecture']}, {found['tensors']} tensors in {dtype}, {found['bytes'] / 1e6:.1f} MB",
        soft_wrap=True,
    )
