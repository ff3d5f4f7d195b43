"""A server to test, known only by its URL, and the two ways to talk to it (`async with target`).

Valid requests go through the real `openai` client, whatever else through httpx.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import httpx
import openai

TIMEOUT_S = 120.0
_COMPLETION_FIELDS = {
    "prompt", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "echo",
    "logit_bias", "stream_options", "presence_penalty", "frequency_penalty", "user",
}  # fmt: skip


@dataclass
class Answer:
    """A completion or chat answer, whole or put together from chunks, by choice."""

    texts: list[str]
    reasons: list[str | None]
    token_ids: list[list[int]]
    usage: Any = None
    chunks: list[Any] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Target:
    """A running server.

    Attributes:
        url: without /v1.
        model: its served name.
        vocab_size / max_model_len / pool_tokens: what it was started with.
        eos_ids: every id that ends a text.
        count_chat_tokens: messages -> tokens of the model's own chat template tokenised once.
        prompt: any short prompt.
        emoji_prompt: makes the model write emoji, if it can.
        scale: share of the heavy scripts' requests to send.
    """

    url: str
    model: str
    vocab_size: int
    max_model_len: int
    pool_tokens: int
    eos_ids: Sequence[int]
    count_chat_tokens: Callable[[list[dict[str, Any]]], int] | None = None
    prompt: str = "The capital of France is"
    emoji_prompt: str = (
        "Print ten emoji: \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
    )
    scale: float = 1.0

    async def __aenter__(self) -> Target:
        """Open the clients: http and client."""
        limits = httpx.Limits(max_connections=None)
        # verify: a TLS context takes longer to make than most cases.
        self.http = httpx.AsyncClient(
            base_url=self.url, timeout=TIMEOUT_S, limits=limits, verify=False
        )
        self.client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.http.aclose()

    async def complete(self, **body: Any) -> Answer:
        """/v1/completions, whole; token ids come with it."""
        answer: Any = await self.client.completions.create(**self._typed(body))
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        return Answer(
            [choice.text for choice in choices],
            [choice.finish_reason for choice in choices],
            [choice.model_extra["token_ids"] for choice in choices],
            answer.usage,
            logprobs=[choice.logprobs for choice in choices],
        )

    async def stream(self, **body: Any) -> Answer:
        """/v1/completions, streamed and joined."""
        answer = Answer([], [], [])
        chunks: Any = await self.client.completions.create(**self._typed(body), stream=True)
        async for chunk in chunks:
            answer.chunks.append(chunk)
            answer.usage = chunk.usage or answer.usage
            for choice in chunk.choices:
                while len(answer.texts) <= choice.index:
                    answer.texts.append("")
                    answer.reasons.append(None)
                    answer.token_ids.append([])
                assert answer.reasons[choice.index] is None, "a chunk after the end"
                answer.texts[choice.index] += choice.text
                answer.reasons[choice.index] = choice.finish_reason
                answer.token_ids[choice.index] += choice.model_extra["token_ids"]
        return answer

    def _typed(self, body: dict[str, Any]) -> dict[str, Any]:
        extra = {name: value for name, value in body.items() if name not in _COMPLETION_FIELDS}
        known = {name: value for name, value in body.items() if name in _COMPLETION_FIELDS}
        known.setdefault("prompt", self.prompt)
        return {"model": self.model, **known, "extra_body": {"return_token_ids": True, **extra}}

    async def post(self, path: str, body: object) -> httpx.Response:
        """Anything as JSON; bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return await self.http.post(path, content=content, headers=headers)

    async def leave(self, path: str, body: object, after_s: float) -> None:
        """Send a request and hang up, whatever has come by then."""
        content = json.dumps(body).encode()
        url = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        await asyncio.sleep(after_s)
        writer.close()

    async def refused(
        self,
        body: object,
        *,
        path: str = "/v1/completions",
        status: int = 400,
        param: str | None = None,
        words: Sequence[str] = (),
    ) -> dict[str, Any]:
        """The request is refused in OpenAI's error shape, naming what was asked for."""
        response = await self.post(path, body)
        assert response.status_code == status, (response.status_code, response.text)
        assert response.headers["content-type"] == "application/json"
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str) and error["message"]
        if param is not None:
            assert error["param"] == param, error
        for word in words:
            assert word in error["message"], error
        return error

    async def fields_refused(self, name: str, values: Sequence[object], **body: Any) -> None:
        """Each value of a field is refused with the field's name."""
        for value in values:
            request = {"prompt": self.prompt, "max_tokens": 4, **body, name: value}
            error = await self.refused(request)
            assert (error["param"] or "").split(".")[0] == name, (value, error)

    async def gauges(self) -> dict[str, float]:
        """The numbers out of /metrics, by name (with labels) without prefix."""
        text = (await self.http.get("/metrics")).text
        found = re.findall(r"^fullgraph_(?:engine_)?(\S+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    async def steps(self) -> float:
        """Done by the engine so far."""
        gauges = await self.gauges()
        return gauges["steps_decode_total"] + gauges["steps_extend_total"]

    async def quiet(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Wait until nothing runs or waits; every page is free or cached then."""

        async def poll() -> dict[str, float]:
            while True:
                gauges = await self.gauges()
                busy = (gauges.get(name, 1) for name in ("running", "waiting", "pages_held"))
                if not any(busy):
                    return gauges
                await asyncio.sleep(0.02)

        gauges = await asyncio.wait_for(poll(), timeout_s)
        pages = [gauges[f"pages_{kind}"] for kind in ("free", "cached", "held", "total")]
        assert sum(pages[:3]) == pages[3], gauges
        return gauges


def strict_json(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def all_of(*coroutines: Awaitable[Answer]) -> list[Answer]:
    """At the same time."""
    return list(await asyncio.gather(*coroutines))
