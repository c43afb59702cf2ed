"""What the server says about itself: /health, /v1/models, /v1/backends."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from vox_host.app.model_info import ModelInfo, merged_facts, numerics_facts
from vox_host.server.api_error import ApiError, without_folders
from vox_host.server.exchange import EXCHANGE, json_response

__all__ = ["adapter_facts", "handle_backends", "handle_health", "handle_model", "handle_models"]


async def handle_health(request: web.Request) -> web.Response:
    """Answer GET /health: 200 and "ok" only while a request would be answered."""
    exchange = request.app[EXCHANGE]
    info = exchange.service.info
    health = exchange.service.health()
    body = {
        "status": "ok" if health.is_ready else "unavailable",
        "service": "vox-host",
        "ready": health.is_ready,
        "state": health.state,
        "detail": without_folders(health.detail) if health.detail else None,
        "model": info.name,
        "adapter": adapter_facts(info),
        "plugin": info.plugin_id,
        "lane": info.lane,
        "numerics": info.numerics,
        "numerics_error": numerics_facts(info.numerics_error),
        "degraded": info.degraded,
        "warnings": [without_folders(warning) for warning in info.warnings],
        "answers_in_flight": exchange.admission.outstanding,
    }
    if health.is_ready:
        return json_response(body)
    # What has failed for good is not worth coming back for.
    headers = {} if health.state == "failed" else {"retry-after": "1"}
    return json_response(body, status=503, headers=headers)


async def handle_models(request: web.Request) -> web.Response:
    """Answer GET /v1/models."""
    return json_response({"object": "list", "data": [_model(request)]})


async def handle_model(request: web.Request) -> web.Response:
    """Answer GET /v1/models/{id}."""
    model = _model(request)
    wanted = request.match_info["model"]
    if wanted != model["id"]:
        raise ApiError(
            404,
            f'the model "{wanted[:100]}" is not served here; this server has "{model["id"]}"',
            code="model_not_found",
            param="model",
        )
    return json_response(model)


async def handle_backends(request: web.Request) -> web.Response:
    """Answer GET /v1/backends: the chosen plugin, and one record per candidate and stage."""
    info = request.app[EXCHANGE].service.info
    return json_response(
        {
            "object": "list",
            "selected": {
                "plugin": info.plugin_id,
                "plugin_version": info.plugin_version,
                "lane": info.lane,
                "numerics": info.numerics,
                "numerics_error": numerics_facts(info.numerics_error),
                "degraded": info.degraded,
            },
            "data": [{name: _without_paths(value) for name, value in row.items()} for row in info.backends],
        }
    )


def adapter_facts(info: ModelInfo) -> dict[str, Any] | None:
    """Return what is told of the adapter; None: the model is served as it is."""
    return None if info.adapter is None else info.adapter.as_dict()


def _without_paths(value: Any) -> Any:
    return without_folders(value) if isinstance(value, str) else value


def _model(request: web.Request) -> dict[str, Any]:
    service = request.app[EXCHANGE].service
    info: ModelInfo = service.info
    return {
        "id": info.name,
        "object": "model",
        "created": info.created,
        "owned_by": "vox-host",
        "root": info.name,
        "parent": None if info.adapter is None else info.adapter.base,
        "max_model_len": info.context_length,
        "loaded_context_length": info.context_length,
        "model_context_length": info.model_context_length,
        "vox": {
            "digest": info.digest,
            "adapter": adapter_facts(info),
            "merged_from": merged_facts(info),
            "architecture": info.architecture,
            "parameters": info.parameters,
            "vocab_size": info.vocab_size,
            "has_chat_template": service.has_chat_template,
            "plugin": info.plugin_id,
            "lane": info.lane,
            "numerics": info.numerics,
            "numerics_error": numerics_facts(info.numerics_error),
        },
    }
