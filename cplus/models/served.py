"""Models behind OpenAI-compatible servers (vLLM, llama.cpp, TGI, Ollama): chat answers, with retries and a cache."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cplus.base import files
from cplus.base.terminal import track
from cplus.data.examples import FreeForm, turn_row
from cplus.data.prompts import as_text

T = TypeVar("T")

KEY = "CPLUS_API_KEY"
"""The environment's name of the key; it is sent to the servers given and written nowhere."""
PARALLEL, TRIES = 8, 5
TIMEOUT, WAIT = 300.0, 1.0
"""Seconds for one answer, and before the second try; each later try waits twice as long."""
FRESH = 24 * 3600
"""Seconds for which an answer is reused."""
REPEATED = 3
"""Answers of the cache that are asked for again: another model at the same address gives others."""


class Answer(NamedTuple):
    """An answer to a request, and whether the model ended it itself."""

    text: str
    ended: bool


class _Stays(urllib.request.HTTPRedirectHandler):
    """A redirection would take the key to another place."""

    def redirect_request(self, *args: Any) -> None:
        """Follow none."""


_OPENER = urllib.request.build_opener(_Stays)


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model behind a server."""

    name: str
    url: str
    model: str

    @property
    def fingerprint(self) -> str:
        """What is known of it; its weights are not."""
        return f"served as {self.model}"

    def answers(
        self, rows: Sequence[FreeForm], *, max_new_tokens: int, thinking: bool = False, what: str = "answering"
    ) -> list[Answer]:
        """The likeliest answer to each row; those of the last day are not asked again.

        Each answer is kept as soon as it is there, so that none is lost where a later one fails.
        """
        options = {"temperature": 0, "max_tokens": max_new_tokens}
        paths = [_place(self.url, self.model, row, options, thinking) for row in rows]
        found = {place: answer for place, path in enumerate(paths) if (answer := _stored(path)) is not None}
        for place in sorted(found, key=lambda place: -len(found[place].text))[:REPEATED]:
            if self._answer(rows[place], options, thinking) != found[place]:
                found = {}  # another model at this address, or one that does not repeat itself
                break

        def asked(place: int) -> None:
            found[place] = self._answer(rows[place], options, thinking)
            files.write_json(paths[place], found[place])

        with ThreadPoolExecutor(PARALLEL) as pool:
            waiting = [pool.submit(asked, place) for place in range(len(rows)) if place not in found]
            try:
                for done in track(as_completed(waiting), what, total=len(waiting)):
                    done.result()
            except OSError as error:
                pool.shutdown(cancel_futures=True)  # those under way are waited for
                raise ConnectionError(
                    f"{error}; {len(found)} of {len(rows)} answers of this part are kept: repeat the command to go on"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)
        return [found[place] for place in range(len(rows))]

    def _answer(self, row: FreeForm, options: dict[str, Any], thinking: bool) -> Answer:
        url, body = f"{self.url}/chat/completions", {"model": self.model, **options}
        whole = {**body, "messages": [turn_row(turn) for turn in row.messages]}
        whole["chat_template_kwargs"] = {"enable_thinking": thinking}
        if row.tools:
            whole["tools"] = json.loads(row.tools)
        try:
            return call(url, whole, _said)
        except _Declined:  # a server that knows no such fields; tools are then written as text
            plain = [turn_row(turn) for turn in as_text(row.messages, row.tools)]
            return call(url, {**body, "messages": plain}, _said)


def served(name: str) -> Served:
    """The model behind `http://HOST:PORT`, or `http://HOST:PORT#MODEL` where the server has several."""
    address, _, wanted = name.partition("#")
    url = f"{address.rstrip('/').removesuffix('/v1')}/v1"
    models = call(f"{url}/models", None, lambda answer: [str(one["id"]) for one in answer["data"]])
    if wanted and wanted not in models:
        raise ValueError(f"{address}: expected the model {wanted}, but it serves {', '.join(models) or 'none'}")
    if not wanted and len(models) != 1:
        raise ValueError(
            f"{address}: expected one model, but it serves {', '.join(models) or 'none'}; give {address}#MODEL"
        )
    return Served(name=name, url=url, model=wanted or models[0])


def _place(url: str, model: str, row: FreeForm, options: dict[str, Any], thinking: bool) -> Path:
    asked = [turn_row(turn) for turn in row.messages]
    key = files.fingerprint([url, model, asked, row.tools, options, thinking])
    return files.cache_folder() / "answers" / "served" / f"{key[:32]}.json"


def _stored(path: Path) -> Answer | None:
    fresh = path.is_file() and time.time() - path.stat().st_mtime < FRESH
    return Answer(*files.read_json(path)) if fresh else None


class _Declined(ConnectionError):
    """The server does not accept the request as it is."""


def _said(answer: Any) -> Answer:
    """The text of an answer, with a thought and calls of tools as a model writes them."""
    choice = answer["choices"][0]
    message = choice["message"]
    thought = message.get("reasoning_content") or message.get("reasoning")
    parts = [f"<think>{thought}</think>"] if thought else []
    parts += [message["content"]] if message.get("content") else []
    parts += [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls") or ()]
    return Answer("\n".join(parts).strip(), choice.get("finish_reason") != "length")


def call(url: str, body: dict[str, Any] | None, read: Callable[[Any], T]) -> T:
    """What `read` finds in the server's answer; whatever may pass is tried again, each time after a longer pause."""
    data = None if body is None else json.dumps(body).encode()
    key, pause, reason = os.environ.get(KEY), WAIT, ""
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    for left in reversed(range(TRIES)):
        asked = 0.0
        try:
            with _OPENER.open(request, timeout=TIMEOUT) as response:
                until, text = time.monotonic() + TIMEOUT, b""
                while piece := response.read1(1 << 16):
                    text += piece
                    if time.monotonic() > until:  # a drop a second is no answer either
                        raise TimeoutError("timed out")
            return read(json.loads(text))
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if error.code in (401, 403):
                raise ConnectionError(f"{url}: {reason}: expected a key that it accepts in {KEY}") from error
            if error.code in (400, 422):
                raise _Declined(f"{url}: {reason}: {error.read(300).decode(errors='replace')!r}") from error
            if error.code not in (408, 409, 425, 429) and error.code < 500:
                raise ConnectionError(f"{url}: {reason}: expected an OpenAI-compatible server") from error
            given = error.headers.get("Retry-After") or ""
            asked = float(given) if given.isdigit() else 0.0
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
            inner = getattr(error, "reason", error)
            if body is None and isinstance(inner, ConnectionRefusedError):
                raise ConnectionError(f"{url}: no server answers there ({inner.strerror}); start it first") from error
            reason = str(inner) if isinstance(error, OSError) else f"no usable JSON ({type(error).__name__})"
        if left:
            time.sleep(min(max(pause, asked), TIMEOUT))
            pause *= 2
    raise ConnectionError(f"{url}: no usable answer in {TRIES} tries ({reason})")
