"""The content of a bank, measured from its texts alone: copies, leaks, confidence, labels, words, topics.

Paper: App. C.2, Self-Probe Bank Audit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean, median
from string import ascii_uppercase
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.spatial.distance import jensenshannon

from cplus.base.files import fingerprint
from cplus.data.examples import Choice, Example
from cplus.probes.bank import Bank, anchors_hash
from cplus.probes.settings import input_key, input_text, normalise, words

NEAR = 0.9
_TO_READ = 20


def audit(bank: Bank, against: Mapping[str, Sequence[Example]], *, seed: int = 0) -> dict[str, Any]:
    """All figures of one bank as one JSON value, compared with examples for evaluation or training by their source.

    Its anchors are used if one of the sources contains them.
    """
    anchors = next(filter(None, (sealed_anchors(bank, rows) for rows in against.values())), [])
    options = bank.manifest["interface"] == "letter"
    texts = [input_text(example, options=options) for example in bank.examples]
    keys = [input_key(example, options=options) for example in bank.examples]
    counts = bank.manifest["counts"]
    found = {name: overlap(bank.examples, rows, options=options) for name, rows in against.items()}
    pairs = [{"file": name, **pair} for name, one in found.items() for pair in one.pop("nearest")]
    return {
        "bank": {key: bank.manifest[key] for key in ("model", "interface", "settings", "engine", "probes_sha256")},
        "probes": len(keys),
        "unique": len(set(keys)),
        "distinct_share": round(len(set(keys)) / len(keys), 6),
        "duplicates": [
            {"text": texts[keys.index(key)], "times": count} for key, count in Counter(keys).items() if count > 1
        ],
        "confidence": confidence([probe.confidence for probe in bank.probes]),
        "against": found,
        "nearest": sorted(pairs, key=lambda pair: -pair["jaccard"])[:_TO_READ],
        "labels": labels(bank.examples, anchors, by_position=options),
        "counts": counts,
        "yield": bank.manifest["yield"],
        "rejected_shares": {
            reason: round(count / counts["requests"], 6) for reason, count in Counter(counts["rejected"]).most_common()
        },
        "parts": bank.manifest.get("parts", []),
        "sample": [
            {
                "id": probe.example.id,
                "text": input_text(probe.example, options=options),
                "answer": probe.example.right if isinstance(probe.example, Choice) else probe.example.response,
                "confidence": probe.confidence,
                "topic": probe.topic,
            }
            for probe in random.Random(seed).sample(bank.probes, min(_TO_READ, len(bank.probes)))
        ],
    }


def short_audit(bank: Bank, rows: Sequence[Example]) -> dict[str, Any]:
    """The figures of a bank that a study's record holds; hashes of its inputs let several banks be compared.

    Paper: App. C.2.
    """
    options = bank.manifest["interface"] == "letter"
    found = overlap(bank.examples, rows, options=options)
    keys = [input_key(example, options=options) for example in bank.examples]
    values = [probe.confidence for probe in bank.probes]
    return {
        "probes": len(keys),
        "unique": len(set(keys)),
        "confidence": confidence(values),
        "against": {name: found[name] for name in ("rows", "exact", "near")},
        "yield": bank.manifest["yield"],
        "requests": bank.manifest["counts"]["requests"],
        "rejected": dict(bank.manifest["counts"]["rejected"]),
        "keys": " ".join(fingerprint(key)[:12] for key in keys),
        "confidences": " ".join(f"{value:.4g}" for value in values),
    }


def together(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of several short audits as of one bank: an input that two banks share counts once as unique.

    Paper: App. C.2.
    """
    keys = [key for own in found for key in own["keys"].split()]
    values = [float(value) for own in found for value in own["confidences"].split()]
    copies = {kind: sum(own["against"][kind] for own in found) for kind in ("exact", "near")}
    shares = {f"{kind}_share": 100 * count / len(keys) for kind, count in copies.items()}
    return {"probes": len(keys), "unique": len(set(keys)), **confidence(values), **copies, **shares}


def confidence(values: Sequence[float]) -> dict[str, float]:
    """The frozen model's confidence in its answers.

    >>> confidence([0.5, 0.9, 1.0])
    {'mean': 0.8, 'median': 0.9, 'p10': 0.58}
    """
    p10 = float(np.percentile(values, 10))
    return {"mean": round(mean(values), 6), "median": round(median(values), 6), "p10": round(p10, 6)}


def jaccard(left: Sequence[str], right: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Shared words divided by all words, for every pair of texts.

    >>> jaccard(["a b c"], ["A, b!", "x"]).round(2).tolist()
    [[0.67, 0.0]]
    """
    sets = [words(text) for text in (*left, *right)]
    ids = {word: number for number, word in enumerate(set().union(*sets))}
    rows = np.repeat(np.arange(len(sets)), [len(own) for own in sets])
    columns = [ids[word] for own in sets for word in own]
    whole = csr_array((np.ones(len(rows), dtype=np.int32), (rows, columns)), shape=(len(sets), max(len(ids), 1)))
    a, b = whole[: len(left)], whole[len(left) :]
    shared = (a @ b.T).toarray().astype(np.float64)
    either = a.sum(1)[:, None] + b.sum(1)[None, :] - shared
    ratio: np.ndarray[Any, np.dtype[np.float64]] = np.divide(
        shared, either, out=np.zeros_like(shared), where=either > 0
    )
    return ratio


def overlap(probes: Sequence[Example], rows: Sequence[Example], *, options: bool) -> dict[str, Any]:
    """The number of probes that a file contains, exactly or nearly, and the most similar pairs."""
    known = {input_key(row, options=options) for row in rows}
    exact = [probe.id for probe in probes if input_key(probe, options=options) in known]
    left, right = ([input_text(example, options=options) for example in some] for some in (probes, rows))
    similarity = jaccard(left, right)
    best: list[int] = similarity.argmax(1).tolist()
    closest = [float(similarity[i, j]) for i, j in enumerate(best)]
    near = [probe.id for probe, value in zip(probes, closest, strict=True) if value >= NEAR]
    return {
        "rows": len(rows),
        "exact": len(exact),
        "exact_share": round(len(exact) / len(probes), 6),
        "exact_ids": exact,
        "near": len(near),
        "near_share": round(len(near) / len(probes), 6),
        "near_ids": near,
        "nearest": [
            {
                "jaccard": round(closest[i], 4),
                "probe": probes[i].id,
                "probe_text": left[i],
                "row": rows[best[i]].id,
                "row_text": right[best[i]],
            }
            for i in sorted(range(len(probes)), key=lambda i: -closest[i])[:_TO_READ]
        ],
    }


def sealed_anchors(bank: Bank, examples: Sequence[Example]) -> list[Example]:
    """The anchors that the bank was built from, if these are among the examples; the bank has only their hash."""
    sealed, rows = bank.manifest["anchors"], {example.id: example for example in examples}
    found = [rows[id] for id in sealed["ids"] if id in rows]
    return found if len(found) == len(sealed["ids"]) and anchors_hash(found) == sealed["sha256"] else []


def labels(probes: Sequence[Example], anchors: Sequence[Example], *, by_position: bool) -> dict[str, Any]:
    """The shares of the answers in the bank and among the anchors, and the divergence between them.

    An answer is identified by the letter of its position or by its words. `divergence` is the Jensen-Shannon divergence
    in bits: 0 for equal shares, 1 for no answer in common.

        JS(p, q) = KL(p || m) / 2 + KL(q || m) / 2,  m = (p + q) / 2
    """

    def answer(example: Example) -> str:
        if not isinstance(example, Choice):
            return normalise(example.response)
        return ascii_uppercase[example.answer] if by_position else normalise(example.right)

    ours, theirs = (Counter(map(answer, some)) for some in (probes, anchors))
    p, q = ([counts[name] for name in sorted({*ours, *theirs})] for counts in (ours, theirs))
    return {
        "distinct": len(ours),
        "shares": {answer: round(count / len(probes), 6) for answer, count in ours.most_common(_TO_READ)},
        "anchor_shares": {answer: round(count / len(anchors), 6) for answer, count in theirs.most_common(_TO_READ)},
        "divergence": round(float(jensenshannon(p, q, base=2)) ** 2, 6) if anchors else None,
    }
