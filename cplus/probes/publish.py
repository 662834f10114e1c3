"""A bank as a data set that others can load, and back: the seal holds wherever the rows have been."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cplus.files import sha256_file, write_text
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
answer. The answers record how the model behaves; nobody has verified them. `{manifest}` holds the settings and the seal.

```python
from datasets import load_dataset
probes = load_dataset("this/folder", split="train")
```
"""


def publish(bank: Bank, folder: Path) -> None:
    """Write a bank as a folder that `datasets.load_dataset` reads and `Bank.load` still verifies."""
    manifest = {key: value for key, value in bank.manifest.items() if key not in ("format", "probes_sha256")}
    seal(folder, bank.probes, manifest)
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
    """Bring a published bank back: a folder, or owner/name on the hub, whatever file format its rows are in there."""
    try:
        from datasets import load_dataset
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise ImportError(
            "reading a published bank that is not a plain bank folder needs the package datasets: pip install datasets"
        ) from error
    local = Path(source)
    manifest = local / MANIFEST if local.is_dir() else Path(hf_hub_download(source, MANIFEST, repo_type="dataset"))
    return restore(load_dataset(source, split="train"), read_manifest(manifest), folder)


def restore(rows: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any], folder: Path) -> Bank:
    """Seal rows again under the manifest they were published with; rows that differ from it are refused."""
    probes = [probe_from_row(row) for row in rows]
    bank = seal(folder, probes, {key: value for key, value in manifest.items() if key not in ("format", "probes_sha256")})
    return bank
