"""An engine that samples from a vLLM server, for large models or many probes."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from cplus.models.decoding import End, Request, Sample, Sampling

_TIMEOUT = 600


class ServerEngine:
    """Sends token prompts, each with its own seed, to the completions endpoint of `vllm serve MODEL`.

    The server samples the inputs; the answers still come from the locally loaded model.
    """

    def __init__(self, url: str, *, parallel: int = 64) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"expected the address of a vLLM server such as http://localhost:8000, got {url!r}")
        self._url, self._parallel = url.rstrip("/").removesuffix("/v1"), parallel
        self._model = self._served()

    def describe(self) -> dict[str, Any]:
        """The model and version that the server reports; its address does not affect the samples."""
        return {"name": "vllm", "model": self._model, "version": self._call("/version", None).get("version")}

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Yield each request's sample when it is finished."""
        with ThreadPoolExecutor(self._parallel) as pool:
            waiting = [pool.submit(self._complete, request, sampling) for request in requests]
            try:
                for done in as_completed(waiting):
                    yield done.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _complete(self, request: Request, sampling: Sampling) -> Sample:
        body = {
            "model": self._model,
            "prompt": list(request.prompt),
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "max_tokens": sampling.max_new_tokens,
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
        }
        answer = self._call("/v1/completions", body)
        try:
            choice, tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
            text, finish, reason = choice["text"], choice["finish_reason"], choice.get("stop_reason")
        except (KeyError, IndexError, TypeError) as error:
            raise ConnectionError(
                f"expected choices, text and usage in the answer of {self._url}, got {answer!r:.200}"
            ) from error
        # The server names a stop text as the reason, but not the model's own end of text.
        end: End = "limit" if finish == "length" else "stop" if isinstance(reason, str) else "end of text"
        return Sample(index=request.index, text=text, tokens=tokens, end=end)

    def _served(self) -> str:
        models = self._call("/v1/models", None).get("data", [])
        if len(models) != 1:
            raise ValueError(f"expected a server with one model at {self._url}, but it serves {len(models)}")
        return str(models[0]["id"])

    def _call(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers={"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise ConnectionError(
                f"{self._url}{path} refused the request: {error.code} {error.read()[:300]!r}"
            ) from error
        except (urllib.error.URLError, TimeoutError) as error:
            raise ConnectionError(
                f"no vLLM server answers at {self._url} ({error}); start one with 'vllm serve MODEL'"
            ) from error
        except ValueError as error:
            raise ConnectionError(f"expected JSON from {self._url}{path}, but it does not parse: {error}") from error
        if not isinstance(answer, dict):
            raise ConnectionError(f"expected a JSON object from {self._url}{path}, got {answer!r:.100}")
        return answer
