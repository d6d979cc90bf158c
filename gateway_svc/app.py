"""The HTTP application: routes, the errors that they share, and the bound of a body."""

import asyncio
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Header, HTTPException, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

import quire
from common.rare_warning import RareWarning
from gateway_svc.anthropic import models as anthropic_models
from gateway_svc.anthropic.fields import Conversation, MessageRequest
from gateway_svc.anthropic.messages import Messages
from gateway_svc.body_limit import BodyLimit
from gateway_svc.cache_control import NeverCached
from gateway_svc.call_log import log_call
from gateway_svc.departure import answer_unless_departed
from gateway_svc.error_answer import error_answer
from gateway_svc.error_handlers import METHODS, add_error_handlers
from gateway_svc.head_method import HeadAsGet
from gateway_svc.headers import IdempotencyKey, LastEventId
from gateway_svc.http_figures import HttpFigures, MeasuredCalls
from gateway_svc.json_body import JsonRoute
from gateway_svc.key_check import KeyCheck
from gateway_svc.metrics import Metrics
from gateway_svc.openai import models as openai_models
from gateway_svc.openai.chat import Chats
from gateway_svc.openai.chat_request import ChatRequest
from gateway_svc.openai.completions import CompletionRequest, Completions
from gateway_svc.openai.responses.responses import Responses
from gateway_svc.openai.responses.routes import responses_router
from gateway_svc.openapi.document import describe
from gateway_svc.prefixes import prefixes_router
from gateway_svc.requests import requests_router
from gateway_svc.served_model import ServedModel
from gateway_svc.tokens import DetokenizeRequest, TokenizeRequest, Tokens
from gateway_svc.vocabulary import Vocabulary
from quire.api_keys import AcceptedKeys
from quire.connection import JOURNAL_SERVICE

AnthropicVersion = Annotated[str | None, Header()]

_SCRIPT_HEADERS = ("x-request-id", "request-id", "retry-after", "x-should-retry")  # that scripts may read
_READY_S = 3.0  # for the scheduler's answer; requests wait longer for it


def for_web_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """The finished application for scripts of web pages of these origins, which may read every answer and failure."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=_SCRIPT_HEADERS,
        allow_private_network=True,  # else a page of the internet may not call this machine, though its origin is named
    )


def create_app(
    client: quire.AsyncClient,
    *,
    max_body_bytes: int,
    keys: Callable[[], AcceptedKeys] | None = None,
    logs_calls: bool = False,
) -> FastAPI:
    """The application, which answers by calls to the client.

    Args:
        client: of the SDK.
        max_body_bytes: of a request.
        keys: the present API keys; without them everybody is answered.
        logs_calls: write a line about each call that has ended.
    """
    app = FastAPI(openapi_url=None, redirect_slashes=False, generate_unique_id_function=lambda route: route.name)
    app.router.route_class = JsonRoute
    figures = HttpFigures()
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes, respond=error_answer)
    if keys is not None:
        app.add_middleware(KeyCheck, keys=keys, respond=error_answer)
    app.add_middleware(MeasuredCalls, figures=figures, report=log_call if logs_calls else None)
    app.add_middleware(HeadAsGet)
    app.add_middleware(NeverCached)
    add_error_handlers(app)
    vocabulary = Vocabulary(client)
    model = ServedModel(client, vocabulary)
    _add_openai(app, client, model, vocabulary)
    app.include_router(responses_router(Responses(client, model, vocabulary)))
    _add_anthropic(app, client, model, vocabulary)
    _add_models(app, model)
    _add_tokens(app, Tokens(client, model))
    app.include_router(requests_router(client))
    app.include_router(prefixes_router(client, model))
    _add_health(app, client)
    _add_metrics(app, Metrics(client, figures))
    _add_description(app)
    return app


def _add_openai(app: FastAPI, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
    completions = Completions(client, model, vocabulary)
    chats = Chats(client, model, vocabulary)

    @app.post("/v1/completions", response_model=None)
    async def complete(
        body: CompletionRequest,
        request: Request,
        idempotency_key: IdempotencyKey = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        return await answer_unless_departed(request, completions.answer(body, idempotency_key, last_event_id))

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(
        body: ChatRequest,
        request: Request,
        idempotency_key: IdempotencyKey = None,
        last_event_id: LastEventId = None,
    ) -> Response:
        return await answer_unless_departed(request, chats.answer(body, idempotency_key, last_event_id))


def _add_anthropic(app: FastAPI, client: quire.AsyncClient, model: ServedModel, vocabulary: Vocabulary) -> None:
    messages = Messages(client, model, vocabulary)

    @app.post("/v1/messages", response_model=None)
    async def message(body: MessageRequest, request: Request, idempotency_key: IdempotencyKey = None) -> Response:
        return await answer_unless_departed(request, messages.answer(body, idempotency_key))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: Conversation) -> dict[str, int]:
        return await messages.count_tokens(body)


def _add_models(app: FastAPI, model: ServedModel) -> None:
    """Models of both APIs, whose clients differ in a header."""

    @app.get("/v1/models")
    async def list_models(anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
        form = openai_models.model_list if anthropic_version is None else anthropic_models.model_list
        return form(await model.get())

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str, anthropic_version: AnthropicVersion = None) -> dict[str, Any]:
        if not name:
            raise HTTPException(404)
        await model.check(name)
        form = openai_models.model_object if anthropic_version is None else anthropic_models.model_object
        return form(await model.get())


def _add_tokens(app: FastAPI, tokens: Tokens) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await tokens.tokenize(body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return await tokens.detokenize(body)


def _add_health(app: FastAPI, client: quire.AsyncClient) -> None:
    unready = RareWarning("not ready")

    @app.get("/health", response_model=None)
    @app.get("/ping", response_model=None, name="ping")  # as SageMaker's probes ask
    @app.post("/ping", response_model=None, name="post_ping")
    async def health() -> Response:
        """200 as long as this process answers: a restart would help nothing else."""
        return Response()

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        """Version of Quire, in vLLM's form."""
        return {"version": version("quire-llm")}

    @app.get("/ready", response_model=None)
    async def ready() -> Response:
        """200 if requests can be served now, else 503."""
        try:
            async with asyncio.timeout(_READY_S):
                health_now, is_accepting = await asyncio.gather(client.health(), _store_answers(client))
        except (quire.QuireError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_READY_S:g} s"
        else:
            if health_now is quire.Health.SERVING and is_accepting:
                return Response()
            reason = "the store does not answer" if not is_accepting else "no worker takes requests"
        unready.record(reason=reason)
        return Response(status_code=503)


async def _store_answers(client: quire.AsyncClient) -> bool:
    """False while the journal's store does not answer, so that requests are refused; older schedulers do not tell."""
    try:
        return await client.health(JOURNAL_SERVICE) is not quire.Health.NOT_SERVING
    except quire.NotFoundError:
        return True


def _add_metrics(app: FastAPI, metrics: Metrics) -> None:
    @app.get("/metrics", response_model=None)
    async def scrape() -> Response:
        """Figures for Prometheus, in its text format."""
        return await metrics.answer()


def _add_description(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    async def description() -> Response:
        """The OpenAPI document of these routes, made once."""
        if not made:
            made.append(orjson.dumps(describe(app.routes)))
        return Response(made[0], media_type="application/json")

    made: list[bytes] = []
