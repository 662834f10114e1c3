"""Publish a bank as a data set and fetch it back; the seal verifies the rows either way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from cplus.files import write_text
from cplus.probes.bank import MANIFEST, PROBES, Bank, probe_from_row, probe_lines, read_manifest, seal

_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: {probes}
tags:
- cplus
- self-probes
---
# Self-probes of {model}

{count} inputs written by {model} (weights {fingerprint}) through the {interface} interface, each with that model's own
answer. The answers record how the model behaves; nobody has verified them. `{manifest}` has the settings and the seal.

```python
from datasets import load_dataset
probes = load_dataset("this/folder", split="train")
```
"""


def publish(bank: Bank, folder: Path) -> None:
    """Write a bank as a folder that `datasets.load_dataset` reads and `Bank.load` still verifies."""
    seal(folder, bank.probes, bank.manifest)
    model = bank.manifest["model"]
    card = _CARD.format(
        probes=PROBES,
        manifest=MANIFEST,
        model=model["name"],
        fingerprint=model["fingerprint"][:12],
        count=len(bank.probes),
        interface=bank.manifest["interface"],
    )
    write_text(folder / "README.md", card)


def fetch(source: str, folder: Path) -> Bank:
    """Fetch a published bank from a folder or from owner/name on the hub, whatever the format of its rows."""
    if (Path(source) / PROBES).is_file():
        bank = Bank.load(source)
        return seal(folder, bank.probes, bank.manifest)
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{source} is not a bank folder; to read it as a data set, install the extra: pip install 'cplus[data]'"
        ) from error
    from huggingface_hub import hf_hub_download

    local = Path(source).is_dir()
    manifest = Path(source) / MANIFEST if local else Path(hf_hub_download(source, MANIFEST, repo_type="dataset"))
    return restore(load_dataset(source, split="train"), read_manifest(manifest), folder)


def restore(rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any], folder: Path) -> Bank:
    """Seal rows under the manifest they were published with; refuse rows that the manifest does not match."""
    # A table fills missing fields with nulls.
    known = [{key: value for key, value in row.items() if value is not None or key == "topic"} for row in rows]
    probes = [probe_from_row(row) for row in known]
    if sha256(probe_lines(probes).encode()).hexdigest() != manifest["probes_sha256"]:
        raise ValueError("the rows are not those the manifest was sealed with; fetch the bank again from its publisher")
    return seal(folder, probes, manifest)
