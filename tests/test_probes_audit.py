"""The audit finds what was planted, and its page shows generated text as text."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cplus.data.examples import Choice, to_row
from cplus.models.decoding import Request, Sampling, ServerEngine
from cplus.probes import audit
from cplus.probes.bank import Bank, Probe, anchors_hash
from cplus.probes.settings import words
from cplus.receipts.page import render_audit

HOSTILE = "Is <script>alert(1)</script> \x1b[31m& </td> safe?"


def choice(id: str, text: str, answer: int = 0) -> Choice:
    return Choice(id=id, question=text, choices=("yes", "no", "never", "often"), answer=answer)


ANCHORS = [choice("a1", "Does the sun rise in the east?", 0), choice("a2", "Can a stone swim?", 1)]
EVALUATION = [
    choice("e1", "What do whales eat in the cold sea near the long white coast of the far north?"),
    choice("e2", "Why is the sky blue?"),
    *ANCHORS,
]


QUESTIONS = [
    choice("p1", "Why is the SKY blue"),  # a leak, word for word but for case and marks
    choice("p2", "What do whales eat in the cold sea near the long white coast of the far south?", 1),  # a near copy
    choice("p3", "Is water wet?", 2),
    choice("p4", "is water  wet", 3),  # a duplicate
    choice("p5", HOSTILE),
]
PLANTED = Bank(
    probes=tuple(
        Probe(example=question, confidence=(n + 1) / 5, request=n, shots=("a1", "a2"), topic=None)
        for n, question in enumerate(QUESTIONS)
    ),
    manifest={
        "model": {"name": "tiny", "fingerprint": "f" * 64},
        "interface": "letter",
        "settings": {"topics": []},
        "engine": {"name": "scripted"},
        "probes_sha256": "0" * 64,
        "anchors": {"count": 2, "ids": ["a1", "a2"], "sha256": anchors_hash(ANCHORS)},
        "counts": {"requests": 9, "accepted": 5, "rejected": {"no end": 4}},
        "yield": 5 / 9,
    },
)
AGAINST = {"evaluation.jsonl": EVALUATION}


def test_planted_copies_are_all_found_and_figures_are_those_by_hand() -> None:
    found = audit.audit(PLANTED, AGAINST)
    assert (found["probes"], found["unique"]) == (5, 4)
    assert found["duplicates"] == [{"text": "Is water wet?\nyes\nno\nnever\noften", "times": 2}]
    overlap = found["against"]["evaluation.jsonl"]
    assert (overlap["exact_ids"], overlap["near_ids"]) == (["p1"], ["p1", "p2"])
    assert (overlap["exact_share"], overlap["near_share"]) == (0.2, 0.4)
    assert [pair["row"] for pair in found["nearest"][:2]] == ["e2", "e1"]
    assert found["nearest"][0]["jaccard"] == 1.0
    assert found["confidence"] == {"mean": 0.6, "median": 0.6, "p10": 0.28}
    assert found["labels"]["shares"] == {"A": 0.4, "B": 0.2, "C": 0.2, "D": 0.2}
    assert found["labels"]["anchor_shares"] == {"A": 0.5, "B": 0.5}
    p, q = np.array([0.4, 0.2, 0.2, 0.2]), np.array([0.5, 0.5, 0, 0])
    m = (p + q) / 2
    expected = ((p * np.log2(p / m)).sum() + (q[:2] * np.log2(q[:2] / m[:2])).sum()) / 2
    assert found["labels"]["divergence"] == pytest.approx(expected, abs=1e-6)
    assert found["yield"] == pytest.approx(5 / 9)
    json.dumps(found, allow_nan=False)


@given(st.lists(st.text(), min_size=1, max_size=5), st.lists(st.text(), min_size=1, max_size=5))
def test_jaccard_is_that_of_the_word_sets(left: list[str], right: list[str]) -> None:
    ratio = audit.jaccard(left, right)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            either = words(a) | words(b)
            assert ratio[i, j] == pytest.approx(len(words(a) & words(b)) / len(either) if either else 0.0)


def test_generated_text_is_escaped_and_the_page_needs_nothing_else() -> None:
    page = render_audit(audit.audit(PLANTED, {"<img src=x>.jsonl": EVALUATION}), name="<b>bank</b>")
    assert not re.search(r"<(script|img|link)\b|<[^>]*\s(on\w+|src|href)=", page)
    assert "<b>bank</b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "prefers-color-scheme: dark" in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.fixture
def audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`cplus probe audit` on banks in the folder; PLANTED is the first, and a part of it the second."""
    from cplus.cli.probe import audit as command
    from cplus.probes.bank import seal

    seal(tmp_path / "one", PLANTED.probes, PLANTED.manifest)
    seal(tmp_path / "two", PLANTED.probes[:3], PLANTED.manifest)
    rows = tmp_path / "evaluation.jsonl"
    rows.write_text("".join(json.dumps(to_row(row)) + "\n" for row in EVALUATION))

    def run(*names: str, against: bool = True, html: Path | None = None, as_json: bool = True) -> Any:
        command([tmp_path / name for name in names], [str(rows)] if against else None, html, as_json)
        told = capsys.readouterr().out
        return json.loads(told) if as_json else told

    return run


def test_the_command_audits_one_bank(tmp_path: Path, audited: Callable[..., Any]) -> None:
    assert audited("one", html=tmp_path / "page.html")["unique"] == 4
    assert "&lt;script&gt;" in (tmp_path / "page.html").read_text()
    told = audited("one", as_json=False)
    assert "4 of 5" in told
    assert "1 exact (20.00%), 2 near (40.00%)" in told
    assert "\x1b" not in told


def test_several_banks_are_audited_side_by_side_and_together(tmp_path: Path, audited: Callable[..., Any]) -> None:
    report = audited("one", "two")
    figures = [(own["probes"], own["unique"], own["against"]["exact"]) for own in report["banks"]]
    assert figures == [(5, 4, 1), (3, 3, 1)]
    whole = report["together"]
    assert (whole["probes"], whole["unique"], whole["exact"]) == (8, 4, 2)  # the second bank is a part of the first
    assert whole["mean"] == pytest.approx((sum(n / 5 for n in range(1, 6)) + (1 + 2 + 3) / 5) / 8, abs=1e-3)
    assert "together" in audited("one", "two", as_json=False)
    with pytest.raises(ValueError, match="a page shows one bank, got 2; leave --html out"):
        audited("one", "two", html=tmp_path / "page.html")


def test_the_command_finds_the_anchors_beside_the_bank(tmp_path: Path, audited: Callable[..., Any]) -> None:
    assert audited("one", against=False)["labels"]["divergence"] is None
    beside = tmp_path / "anchors.jsonl"
    beside.write_text("".join(json.dumps(to_row(row)) + "\n" for row in ANCHORS))
    found = audited("one", against=False)
    assert found["labels"]["anchor_shares"] == {"A": 0.5, "B": 0.5}
    assert list(found["against"]) == ["anchors.jsonl"]
    beside.write_text(json.dumps(to_row(EVALUATION[0])) + "\n")  # anchors of another bank
    assert audited("one", against=False)["against"] == {}


# The vLLM engine, against a server that answers as vLLM does


class Stub(BaseHTTPRequestHandler):
    seen: list[dict[str, Any]] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]} if self.path == "/v1/models" else {"version": "0.32.0"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        ends = [("stop", "\n"), ("stop", None), ("length", None)]
        finish, reason = ends[body["prompt"][0]]
        choice = {"text": f"text {body['prompt'][0]}", "finish_reason": finish, "stop_reason": reason}
        self._answer({"choices": [choice], "usage": {"completion_tokens": 4}})

    def _answer(self, value: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_the_server_engine_sends_tokens_and_seeds() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Stub) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        engine = ServerEngine(f"http://127.0.0.1:{server.server_port}/v1/")
        assert engine.describe() == {"name": "vllm", "model": "served", "version": "0.32.0"}
        sampling = Sampling(temperature=0.8, max_new_tokens=9, stop=("\n",))
        asked = [Request(index=10 + n, prompt=(n, 5), seed=100 + n) for n in range(3)]
        samples = {sample.index: (sample.text, sample.end) for sample in engine.sample(asked, sampling)}
        server.shutdown()
    assert samples == {10: ("text 0", "stop"), 11: ("text 1", "end of text"), 12: ("text 2", "limit")}
    sent = sorted(Stub.seen, key=lambda body: body["seed"])
    assert [body["seed"] for body in sent] == [100, 101, 102]
    assert all(body["stop"] == ["\n"] and body["temperature"] == 0.8 and body["max_tokens"] == 9 for body in sent)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConnectionError, match=r"no vLLM server answers at http://127.0.0.1:9"):
        ServerEngine("http://127.0.0.1:9")
    with pytest.raises(ValueError, match="expected the address of a vLLM server"):
        ServerEngine("localhost")
