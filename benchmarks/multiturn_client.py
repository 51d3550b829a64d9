"""A client for OpenAI-compatible streaming chat endpoints that keeps times and token counts of each answer.

SGLang reports cached prompt tokens in `usage.prompt_tokens_details.cached_tokens` when it runs with
`--enable-cache-report`, and their split over device, host and storage in a chunk of its own,
`sglext.cached_tokens_details`, when the request carries `return_cached_tokens_details` (no server flag
needed). That chunk is left out if nothing was cached. Other servers leave out some or all of this.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp


class ServerError(Exception):
    """A request failed; the message is one line that names the cause."""


class HttpStatusError(ServerError):
    """The server answered with an HTTP status other than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status


@dataclass
class Reply:
    """One complete answer. Times are readings of `time.perf_counter`, in seconds.

    `arrivals` holds one time per delta with text (answer or reasoning); `cached`, `tiers` (device, host,
    store) and the token ids are None if the server did not report them.
    """

    sent: float
    finished: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached: int | None = None
    tiers: tuple[int, int, int] | None = None
    input_ids: list[int] | None = None
    output_ids: list[int] | None = None


def one_line(text: str, limit: int = 300) -> str:
    """`text` on one line, cut to `limit` characters; of an OpenAI error object only its message."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if isinstance(body, dict):
        error = body.get("error", body)
        message = error.get("message") if isinstance(error, dict) else error
        text = str(message or body.get("detail") or text)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def client_error(error: aiohttp.ClientError) -> str:
    """The cause of a failed connection in a few words."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or one_line(str(error.os_error))
    return one_line(str(error)) or type(error).__name__


async def sse_data(stream: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The payloads of the `data:` lines of an event stream, however long the lines are."""
    rest = b""
    async for piece in stream.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()
    if rest.startswith(b"data:"):
        yield rest[5:].strip().decode()


def _take_chunk(reply: Reply, chunk: dict[str, Any], now: float) -> bool:
    """Adds one chunk of the stream to `reply`; says whether it carried the usage."""
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        content = delta.get("content") or ""
        if content or delta.get("reasoning_content") or delta.get("reasoning"):
            reply.arrivals.append(now)
        reply.text += content
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason

    ext = chunk.get("sglext") or {}
    details = ext.get("cached_tokens_details")
    if details:
        reply.tiers = (details.get("device") or 0, details.get("host") or 0, details.get("storage") or 0)
    if ext.get("input_ids"):
        reply.input_ids = ext["input_ids"]
    if ext.get("output_ids"):
        reply.output_ids = ext["output_ids"][0]

    usage = chunk.get("usage")
    if not usage:
        return False
    reply.prompt_tokens = usage["prompt_tokens"]
    reply.completion_tokens = usage.get("completion_tokens") or 0
    reply.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return True


async def stream_chat(http: aiohttp.ClientSession, url: str, body: dict[str, Any], timeout: float) -> Reply:
    """Sends one streaming chat request and reads the answer to its end, within `timeout` seconds.

    Raises ServerError if there is no complete answer with a usage report, HttpStatusError for an HTTP error.
    """
    reply = Reply(sent=time.perf_counter())
    has_usage = False
    try:
        limits = aiohttp.ClientTimeout(total=timeout)
        async with http.post(url, json=body, timeout=limits) as response:
            if response.status != 200:
                raise HttpStatusError(
                    response.status, one_line(await response.text()) or str(response.reason)
                )
            async for data in sse_data(response.content):
                if data == "[DONE]":
                    break
                chunk = json.loads(data)
                if "error" in chunk:
                    raise ServerError(f"error in the stream: {one_line(data)}")
                has_usage |= _take_chunk(reply, chunk, time.perf_counter())
    except TimeoutError:
        raise ServerError(f"no complete answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise ServerError(f"connection failed: {client_error(error)}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ServerError(
            f"unexpected data in the stream: {type(error).__name__}: {one_line(str(error))}"
        ) from None
    reply.finished = time.perf_counter()
    if reply.finish_reason is None:
        raise ServerError("the stream ended before the answer was complete")
    if reply.finish_reason == "abort":
        raise ServerError("the server aborted the request")
    if not has_usage:
        raise ServerError("the server does not report usage in the stream (stream_options.include_usage)")
    return reply


async def get_json(http: aiohttp.ClientSession, url: str, timeout: float) -> Any:
    """The JSON document at `url`. Raises ServerError, HttpStatusError for an HTTP error."""
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=timeout)) as response:
            text = await response.text()
            if response.status != 200:
                raise HttpStatusError(response.status, one_line(text) or str(response.reason))
            return json.loads(text)
    except TimeoutError:
        raise ServerError(f"no answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise ServerError(client_error(error)) from None
    except ValueError:
        raise ServerError(f"{url} does not answer with JSON") from None
