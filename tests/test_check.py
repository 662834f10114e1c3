"""`cplus check`: losses are found where they were planted, servers may fail, and code touches nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import knowing
import pytest
import torch
from typer.testing import CliRunner

from cplus import models
from cplus.cli.app import app
from cplus.evaluation import sandbox
from cplus.evaluation.abilities import MEASURED, Request, requests
from cplus.jobs.settings import settings
from cplus.models import served
from cplus.receipts.page import read_receipt

pytestmark = pytest.mark.usefixtures("one_thread", "cache")

SERVED = [name for name in MEASURED if name not in ("style", "code", "thinking")]
ASKED = {own.request: (name, own) for name in SERVED for own in requests(name)}
Change = Callable[[str, Request], str]


def knows(name: str, request: Request) -> str:
    return request.answer


class Scripted(ThreadingHTTPServer):
    """An OpenAI-compatible server on this machine: `change` makes the answers, `fault` may spoil the n-th request."""

    daemon_threads = True

    def __init__(self, change: Change = knows, fault: Callable[[int, Any], bool] = lambda n, handler: False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.change, self.fault, self.models, self.finish = change, fault, ["served"], "stop"
        self.count, self.lock, self.bodies, self.keys = 0, threading.Lock(), [], set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers a request for the models, or one for a chat answer."""

    server: Scripted

    def reply(self, status: int, value: Any, **headers: str) -> None:
        text = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Length": str(len(text)), **headers}.items():
            self.send_header(name.replace("_", "-"), content)
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.server.keys.add(self.headers.get("Authorization"))
        self.reply(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.count += 1
            count = self.server.count
        if self.server.fault(count, self):
            return
        self.server.bodies.append(body)
        self.server.keys.add(self.headers.get("Authorization"))
        name, request = ASKED[body["messages"][-1]["content"]]
        message = {"role": "assistant", "content": self.server.change(name, request)}
        self.reply(200, {"choices": [{"message": message, "finish_reason": self.server.finish}]})

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scripted]]:
    """Starts servers, which end with the test; pauses between two tries are short."""
    monkeypatch.setattr(served, "WAIT", 0.01)
    monkeypatch.setattr(served, "TIMEOUT", 5.0)
    running: list[Scripted] = []

    def started(*how: Any) -> Scripted:
        running.append(Scripted(*how))
        threading.Thread(target=running[-1].serve_forever, args=(0.02,), daemon=True).start()
        return running[-1]

    yield started
    for server in running:
        server.shutdown()
        server.server_close()


def check(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["check", *map(str, arguments), "--device", "cpu"])


def damaged(found: Any) -> set[str]:
    return {one["name"] for one in json.loads(found.stdout)["lines"] if one["verdict"] == "damaged"}


# A planted loss is found where it was planted, and nowhere else.


def without_json(name: str, request: Request) -> str:
    return request.answer.replace("}", "").replace("]", "") if request.answer[0] in "{[" else request.answer


def helpful(name: str, request: Request) -> str:
    return "Sure! First you need some patience." if "refuses" in request.rules else request.answer


@pytest.mark.parametrize(
    ("change", "finish", "lost"),
    [
        (knows, "stop", set()),
        (without_json, "stop", {"json", "tools"}),
        (helpful, "stop", {"refusals"}),
        (knows, "length", {"stopping"}),
    ],
)
def test_a_planted_loss_is_found_where_it_was_planted(
    start: Callable[..., Scripted], tmp_path: Path, change: Change, finish: str, lost: set[str]
) -> None:
    base, tuned = start(), start(change)
    tuned.finish = finish
    found = check(base.url, f"{tuned.url}/v1/#served", "--json", "--out", tmp_path / "receipt")
    assert found.exit_code == 0, found.output
    assert damaged(found) == lost
    lines = json.loads(found.stdout)["lines"]
    assert [one["name"] for one in lines] == [*SERVED, "stopping"]
    sets = read_receipt(tmp_path / "receipt").sets
    flipped = [row for own in sets for row in own.rows if row.kind == "lost"]
    assert all(row.before and row.after and row.before != row.after for row in flipped)


def test_requirements_on_abilities_are_exit_codes(start: Callable[..., Scripted]) -> None:
    base, tuned = start(), start(without_json)
    only = ("--abilities", "tools,refusals")
    kept = check(base.url, base.url, *only, "--require", "tools>=-5", "--require", "stopping>=-5")
    assert (kept.exit_code, "Met: tools at least -5 points; its lower 95 % bound is -4.6." in kept.stdout) == (0, True)
    lost = check(base.url, tuned.url, *only, "--require", "tools>=-5")
    assert (lost.exit_code, "NOT MET: tools" in lost.stdout) == (2, True)
    table = [line.split() for line in lost.stdout.splitlines()[:4]]
    assert table[0][:5] == ["ability", "before", "after", "lost", "gained"]
    assert (table[1][:5], table[1][-1]) == (["tools", "64", "0", "64", "0"], "damaged")
    for text, words in (
        ("json>=-3", "the lower 95 % bound, which is -6.1 points when none of 48 answers is lost; require less"),
        ("json>=5", "expected retention>=SHARE"),
        ("reasoning>=-20", "needs the ability reasoning to be measured"),
    ):
        assert words in str(check(base.url, tuned.url, *only[: 2 * ("json" not in text)], "--require", text).exception)
    assert settings({"model": "toy", "new": "rows", "keep": ("json",)}).measured == ("everyday", "instructions", "json")


def test_an_ability_that_the_base_model_does_not_show_is_never_kept(start: Callable[..., Scripted]) -> None:
    """A model that refuses nothing gets half of the refusals right, and one without tools none."""
    base = start(lambda name, own: "No idea." if name == "tools" else helpful(name, own))
    found = json.loads(check(base.url, base.url, "--json").stdout)
    verdicts = {one["name"]: one["verdict"] for one in found["lines"]}
    assert [name for name, own in verdicts.items() if own == "not judged"] == ["tools", "refusals"]
    assert found["kept"] == "kept"
    assert "The base model shows too little of tools and refusals to judge." in found["verdict"]


# Servers that fail: no answer is lost, and what cannot be had is one sentence.


def slow(handler: Handler) -> None:
    time.sleep(0.6)


def half(handler: Handler) -> None:
    handler.reply(200, b'{"choices": [{"message": {"content": "Par', Content_Length="900")
    handler.connection.close()


FAULTS: dict[str, Callable[[Handler], Any]] = {
    "429": lambda handler: handler.reply(429, {}, Retry_After="0"),
    "503": lambda handler: handler.reply(503, {"error": "loading"}),
    "dead": lambda handler: handler.connection.close(),
    "slow": slow,
    "wrong JSON": lambda handler: handler.reply(200, b"<html>"),
    "no choices": lambda handler: handler.reply(200, {"error": "busy"}),
    "half a line": half,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_answer_is_lost_to_a_fault_that_passes(
    start: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "slow":
        monkeypatch.setattr(served, "TIMEOUT", 0.3)
    every = 30 if fault == "slow" else 7
    failing = start(knows, lambda n, handler: n % every == 0 and FAULTS[fault](handler) is None)
    found = check(start().url, failing.url, "--json", "--abilities", "everyday,json")
    assert found.exit_code == 0, found.output
    assert [(one["lost"], one["gained"]) for one in json.loads(found.stdout)["lines"]] == [(0, 0)] * 3
    asked = 60 + 48
    assert asked < failing.count < 1.4 * asked


def test_what_was_answered_before_a_server_died_is_not_asked_again(start: Callable[..., Scripted]) -> None:
    base = start()
    dying = start(knows, lambda n, handler: n > 30 and handler.connection.close() is None)
    found = check(base.url, dying.url, "--abilities", "everyday")
    assert found.exit_code == 1
    assert str(found.exception).count("\n") == 0
    kept = int(str(found.exception).partition(" of 60 answers of this part are kept")[0].split()[-1])
    assert 25 <= kept <= 30
    dying.fault, dying.count = lambda n, handler: False, 0
    assert check(base.url, dying.url, "--abilities", "everyday").exit_code == 0
    assert dying.count == 60 - kept + served.REPEATED
    dying.change, dying.count = helpful, 0  # the same answers: nothing is asked but those that are repeated
    assert check(base.url, dying.url, "--abilities", "everyday").exit_code == 0
    assert dying.count == served.REPEATED
    dying.change = lambda name, own: "No."  # another model at the same address
    assert damaged(check(base.url, dying.url, "--abilities", "everyday", "--json")) == {"everyday"}


def test_a_server_that_takes_no_tools_reads_them_as_text(start: Callable[..., Scripted]) -> None:
    plain = start()

    class Strict(Handler):
        """Declines what is not in the oldest of such interfaces."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if b"chat_template_kwargs" in body:
                self.reply(400, {"error": "unknown field"})
                return
            self.server.bodies.append(json.loads(body))
            _, request = ASKED[self.server.bodies[-1]["messages"][-1]["content"]]
            call = {"function": json.loads(request.answer), "type": "function"}
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            choice = {"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}
            self.reply(200, {"choices": [choice]})

    plain.RequestHandlerClass = Strict
    found = json.loads(check(plain.url, plain.url, "--abilities", "tools", "--json").stdout)
    assert found["lines"][0]["kept"]["right"] == 64
    assert "get_weather" in plain.bodies[0]["messages"][0]["content"]


def test_a_key_goes_to_the_server_and_nowhere_else(
    start: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    monkeypatch.setenv("CPLUS_API_KEY", "secret-73")
    base, elsewhere = start(), start()
    found = check(base.url, base.url, "--abilities", "everyday", "--out", tmp_path / "out")
    assert (found.exit_code, base.keys) == (0, {"Bearer secret-73"})
    written = [*cache.rglob("*.json"), *(tmp_path / "out").iterdir()]
    assert len(written) > 60
    assert not any("secret-73" in path.read_text() for path in written)
    assert "secret-73" not in found.output
    sent = start(knows, lambda n, handler: handler.reply(307, {}, Location=elsewhere.url) is None)
    assert "307" in str(check(base.url, sent.url, "--abilities", "everyday").exception)
    assert elsewhere.keys == set(), "a redirection takes no key along"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "no server answers there (Connection refused); start it first"),
        (["URL", "--abilities", "wit"], "expected abilities out of everyday, instructions, json, tools"),
        (["URL", "--abilities", "code"], "code that a model wrote runs only with --run-code"),
        (["URL#other"], "expected the model other, but it serves served"),
        (["TWO"], "expected one model, but it serves a, b; give"),
        (["LOCKED"], "401 Unauthorized: expected a key that it accepts in CPLUS_API_KEY"),
        (["toy"], "no ability can be asked of both"),
    ],
)
def test_bad_input_is_one_sentence(start: Callable[..., Scripted], arguments: list[str], words: str) -> None:
    base, two = start(), start()
    two.models = ["a", "b"]
    locked = start(knows, lambda n, handler: handler.reply(401, {}) is None)
    for name, server in (("URL", base), ("TWO", two), ("LOCKED", locked)):
        arguments = [text.replace(name, server.url) for text in arguments]
    found = check(base.url, *arguments)
    assert found.exit_code == 1
    assert words in str(found.exception)


def test_the_example_fails_a_release_on_the_lower_bound(start: Callable[..., Scripted], tmp_path: Path) -> None:
    base, tuned = start(), start(without_json)
    example = Path(__file__).parent.parent / "examples" / "ci" / "test_release.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(example)]
    where = {**os.environ, "BASE": base.url, "TUNED": tuned.url}
    done = subprocess.run(command, env=where, cwd=tmp_path, capture_output=True, text=True)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert (tmp_path / "check" / "receipt.html").is_file()


# Models on this machine: folders, adapters, and in a mix with servers.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    knowing.write(folder / "base")
    return folder


def test_style_is_judged_by_divergence_and_a_window_may_be_too_small(tiny: Path, tmp_path: Path) -> None:
    loaded = models.load(tiny / "base", device="cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=torch.manual_seed(0)))
    models.save(loaded.model, loaded.tokenizer, tmp_path / "tuned")
    few = ("--abilities", "everyday,style,tools,thinking", "--num-probes", "2", "--json")
    for tuned, lost in ((tiny / "base", range(1)), (tmp_path / "tuned", range(30, 41))):
        found = check(tiny / "base", tuned, *few)
        assert found.exit_code == 0, found.output
        verdict = json.loads(found.stdout)
        assert [one["name"] for one in verdict["lines"]] == ["everyday", "style", "stopping"]
        assert verdict["lines"][1]["lost"] in lost
        assert any(
            "tools was not measured: its requests are longer than the model's window" in v for v in verdict["verdict"]
        )
        assert any("thinking was not measured: the chat template has no thoughts" in v for v in verdict["verdict"])


def test_a_folder_an_adapter_and_a_server_compare_with_each_other(
    tiny: Path, tmp_path: Path, start: Callable[..., Scripted]
) -> None:
    peft = pytest.importorskip("peft")
    loaded = models.load(tiny / "base", device="cpu")
    lora = peft.get_peft_model(loaded.model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    lora.save_pretrained(tmp_path / "adapter")
    own = ("--abilities", "everyday,instructions", "--num-probes", "2", "--json")
    same = check(tiny / "base", tmp_path / "adapter", *own)
    assert "Both models have the same weights." in json.loads(same.stdout)["verdict"], same.output
    server = start()
    mixed = json.loads(check(tiny / "base", server.url, *own).stdout)
    assert (mixed["kept"], mixed["loss"], mixed["divergence"]) == ("kept", None, None)
    lines = json.loads(same.stdout)["lines"]
    assert [one["kept"]["right"] for one in mixed["lines"]] == [one["kept"]["right"] for one in lines]
    back = json.loads(check(server.url, tmp_path / "adapter", *own).stdout)
    assert [one["verdict"] for one in back["lines"]] == ["kept"] * 3


# Code from a model runs apart, or not at all.


HOSTILE = {
    "a file outside": "def f(): return open('/etc/passwd').read()",
    "a file of the user": "def f(): return open('{home}/secret').read()",
    "write outside": "def f(): return open('/usr/cplus-was-here', 'w').write('x')",
    "the network": "import socket\ndef f(): return socket.create_connection(('127.0.0.1', {port}), 1)",
    "another root": "import os\ndef f():\n    os.chroot('/old')\n    return os.listdir('/etc')",
    "mount": "import subprocess\ndef f(): return subprocess.run(['mount', '-o', 'remount,rw', '/usr'], check=True)",
    "processes": "import os\ndef f(): return os.kill({pid}, 0)",
    "no end": "while True: pass",
    "memory": "x = 'a' * (1 << 31)\ndef f(): return 1",
    "a flood": "import sys\nwhile True: sys.stdout.write('x' * 4096)",
    "an early end": "import os\nprint('[1]', flush=True)\nos._exit(1)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_touches_neither_network_nor_files(
    name: str, tmp_path: Path, start: Callable[..., Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    if (problem := sandbox.why_not()) is not None:
        pytest.skip(problem)
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    server = start()
    (tmp_path / "secret").write_text("1")
    code = HOSTILE[name].replace("{home}", str(tmp_path)).replace("{port}", str(server.server_port))
    begun = time.monotonic()
    assert sandbox.values(code.replace("{pid}", str(threading.get_native_id())), ["f()"]) is None
    assert time.monotonic() - begun < 10
    assert sandbox.values(
        "import os\ndef f(): return sorted(os.environ.keys() & {'HOME', 'CPLUS_API_KEY'})", ["f()"]
    ) == ["[]"]
    assert not Path("/usr/cplus-was-here").exists()


def test_code_is_refused_where_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sandbox.why_not.cache_clear()
    monkeypatch.setattr(sandbox, "_NAMESPACES", ("--no-such-namespace",))
    found = check("toy", "toy", "--run-code")
    sandbox.why_not.cache_clear()
    assert "expected a machine that offers namespaces to its users" in str(found.exception)
    assert "leave out --run-code" in str(found.exception)
