"""The HTTP server: an engine and its tokenizer go in, an ASGI app with OpenAI's API, health and metrics comes out."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planc import __version__
from planc.runtime.engine import Engine
from planc.runtime.errors import RequestError
from planc.runtime.formats import ChatFormat, CompletionFormat, Format
from planc.runtime.metrics import Metrics
from planc.runtime.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
    error_body,
    parse,
)
from planc.runtime.sequence import SamplingParams
from planc.runtime.stream import Doorbell, EventStream, Job
from planc.runtime.tokenizer import Tokenizer, check_ids

log = logging.getLogger("planc.server")

MAX_BODY_BYTES = 32 * 2**20
LONG_BODY = 8192  # bytes; encoding more than this takes milliseconds, so it is left to a thread
OPEN_PATHS = ("/health",)
CLIENT_GONE = 499  # nginx's status for a client that left

T = TypeVar("T")


@dataclass
class Service:
    """What the routes share. `draining` is set when the server shuts down: running requests end, no new one begins.

    yield_seconds is how long a step waits at most until the tokens of the one before are sent. It is for an executor
    whose threads take every CPU: sending would interrupt one of them time and again while all the others wait for it.
    """

    engine: Engine
    tokenizer: Tokenizer
    model_name: str
    metrics: Metrics
    api_key: str | None = None
    defaults: Mapping[str, float] = field(default_factory=dict)
    fingerprint: str = ""
    yield_seconds: float = 0.0
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _bell: Doorbell | None = field(default=None, init=False, repr=False)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name != self.model_name:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {self.model_name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, param: str = "prompt", *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; RequestError naming `param` at once when it is far too long."""
        self.tokenizer.check_fits(text, self.engine.limits.max_model_len, param)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt of a completion request."""
        special = body.add_special_tokens
        return [self.encode(p, add_special_tokens=special) if isinstance(p, str) else p for p in body.prompts()]

    def encode_chat(
        self, messages: list[ChatMessage], variables: dict[str, Any], *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a conversation as the model's template writes it."""
        text = self.tokenizer.render_chat([message.as_template_input() for message in messages], **variables)
        return self.encode(text, "messages", add_special_tokens=add_special_tokens)

    def submit(self, body: GenerationRequest, prompts: list[list[int]], params: SamplingParams) -> Job:
        """Queue a request. RequestError leaves nothing behind."""
        if self.draining:
            raise RequestError("the server is shutting down; try again later", status=503, code="shutting_down")
        if self._bell is None or self._bell.loop is not asyncio.get_running_loop():
            self._bell = Doorbell()
            if self.yield_seconds:
                self.engine.between_steps = partial(self._bell.wait, self.yield_seconds)
        job = Job(self.engine, self._bell, prompts, params, body.samples, body.cache_salt or "")
        self.metrics.requested(body.samples)
        return job


def create_app(service: Service) -> ASGIApp:
    """The ASGI app: routes, OpenAI-shaped errors, API key, HTTP metrics."""
    routes = [
        Route("/v1/chat/completions", partial(chat_completions, service), methods=["POST"]),
        Route("/v1/completions", partial(completions, service), methods=["POST"]),
        Route("/v1/models", partial(models, service)),
        Route("/v1/models/{name:path}", partial(model, service)),
        Route("/tokenize", partial(tokenize, service), methods=["POST"]),
        Route("/detokenize", partial(detokenize, service), methods=["POST"]),
        Route("/health", partial(health, service)),
        Route("/metrics", partial(metrics, service)),
        Route("/version", version),
    ]
    handlers: Any = {
        RequestError: _on_request_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_bug,  # starlette raises it again after the answer
    }
    return _Gate(Starlette(routes=routes, exception_handlers=handlers), service)


async def chat_completions(service: Service, request: Request) -> Any:
    """POST /v1/chat/completions."""
    raw = await _read(request)
    body = parse(ChatRequest, raw)
    service.check_model(body.model)
    body.check()
    params = body.sampling(service.defaults)
    encode = partial(
        service.encode_chat, body.messages, body.template_variables(), add_special_tokens=body.add_special_tokens
    )
    prompt = await _aside(len(raw), encode)
    job = service.submit(body, [prompt], params)
    form = ChatFormat(service.model_name, service.fingerprint, service.tokenizer)
    return await _respond(request, body, job, form, body.samples)


async def completions(service: Service, request: Request) -> Any:
    """POST /v1/completions."""
    raw = await _read(request)
    body = parse(CompletionRequest, raw)
    service.check_model(body.model)
    body.check()
    prompts = await _aside(len(raw), partial(service.encode_prompts, body))
    room = service.engine.limits.max_model_len - max(map(len, prompts))
    job = service.submit(body, prompts, body.sampling(service.defaults, room))
    texts = [p if isinstance(p, str) else service.tokenizer.decode(p) for p in body.prompts()] if body.echo else []
    echoes = [text for text in texts for _ in range(body.samples)]
    scored = [p for p in prompts for _ in range(body.samples)] if body.echo and body.logprobs is not None else []
    form = CompletionFormat(service.model_name, service.fingerprint, service.tokenizer, echoes, scored)
    return await _respond(request, body, job, form, len(prompts) * body.samples)


async def _aside(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, which a thread does when the request's body is long: others must not wait for it."""
    return await asyncio.to_thread(work) if size > LONG_BODY else work()


async def _respond(request: Request, body: GenerationRequest, job: Job, form: Format, choices: int) -> Any:
    if body.stream:
        return EventStream(job, form.events(job, choices, body.stream_options or StreamOptions()))
    outputs = await job.collect(request.receive)
    if any(output.finish_reason == "abort" for output in outputs):
        raise RequestError("the server stopped before the response was whole; send the request again", status=503)
    return JSONResponse(form.whole(job, outputs))


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(service: Service, request: Request) -> Response:
    """GET /v1/models/NAME."""
    service.check_model(request.path_params["name"])
    return JSONResponse(_card(service))


async def tokenize(service: Service, request: Request) -> Response:
    """POST /tokenize, as vLLM has it."""
    raw = await _read(request)
    body = parse(TokenizeRequest, raw)
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("expected either prompt or messages; send one of them", param="prompt")
    if body.messages is not None:
        variables = {"add_generation_prompt": body.add_generation_prompt}
        special = bool(body.add_special_tokens)
        encode = partial(service.encode_chat, body.messages, variables, add_special_tokens=special)
    else:
        special = body.add_special_tokens is not False
        encode = partial(service.encode, body.prompt or "", add_special_tokens=special)
    tokens = await _aside(len(raw), encode)
    texts = [service.tokenizer.raw.id_to_token(token) for token in tokens] if body.return_token_strs else None
    limit = service.engine.limits.max_model_len
    return JSONResponse({"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": texts})


async def detokenize(service: Service, request: Request) -> Response:
    """POST /detokenize, as vLLM has it."""
    body = parse(DetokenizeRequest, await _read(request))
    service.check_model(body.model)
    check_ids(body.tokens, service.engine.executor.vocab_size)
    return JSONResponse({"prompt": service.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def health(service: Service, request: Request) -> Response:
    """GET /health: 200 while the server takes requests and the engine makes steps, else 503."""
    return Response(status_code=200 if service.engine.healthy() and not service.draining else 503)


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics."""
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def version(request: Request) -> Response:
    """GET /version."""
    return JSONResponse({"version": __version__})


class _Gate:
    """Around the app: the API key (everything but /health needs it) and one count of each response."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._key = service.api_key.encode() if service.api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, whole = time.monotonic(), 500, False

        async def counted(message: Message) -> None:
            nonlocal status, whole
            status = message.get("status", status)
            await send(message)
            whole = message["type"] == "http.response.body" and not message.get("more_body", False)

        app = self._app if self._allowed(scope) else _unauthorized()
        try:
            await app(scope, receive, counted)
        except Exception:
            if not whole:
                raise  # uvicorn logs it and cuts the connection, which tells the client
            log.exception("a bug while answering %s %s", scope["method"], scope["path"])
        finally:
            route = scope.get("route")
            handler = route.path if isinstance(route, Route) else "none"
            self._service.metrics.served(scope["method"], handler, status, time.monotonic() - started)

    def _allowed(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in OPEN_PATHS:
            return True
        sent = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = sent.partition(b" ")
        return hmac.compare_digest(token.strip(), self._key) and scheme.lower() == b"bearer"


def _unauthorized() -> Response:
    error = RequestError(
        "wrong or missing API key; send it as Authorization: Bearer KEY", status=401, code="invalid_api_key"
    )
    return JSONResponse(error_body(error), 401, {"WWW-Authenticate": "Bearer"})


async def _read(request: Request) -> bytes:
    """The body; 413 when it is larger than any prompt could be."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"the body is larger than {MAX_BODY_BYTES} bytes; send a shorter one", status=413)
    return bytes(body)


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "planc",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.engine.limits.max_model_len,
        "permission": [],
    }


async def _on_request_error(request: Request, error: RequestError) -> Response:
    return JSONResponse(error_body(error), error.status)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = f"{error.detail}: {request.method} {request.url.path}"
    return JSONResponse(error_body(RequestError(message, status=error.status_code)), error.status_code, error.headers)


async def _on_bug(request: Request, error: Exception) -> Response:
    return JSONResponse(error_body(RequestError("internal error; the server's log has more", status=500)), 500)


async def _on_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_GONE)
