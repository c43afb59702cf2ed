"""Errors as HTTP clients see them: a status and one JSON body, OpenAI's.

Clients retry 408, 409, 429 and everything from 500 up by themselves, so what a retry can't
help is a 4xx, and what it may help says when (`retry-after`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vox_host.errors import ModelError, UsageError, VoxError, WorkerFailedError

__all__ = ["ApiError", "api_error_of", "bad_request", "internal_error", "without_folders"]

_FOLDERS = re.compile(r"(?<![\w./:])/(?!v1/)(?:[^\s/'\",;]+/)+")
"""The folders before a file's name in a text; what begins with /v1/ is a path of this API."""

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
}


class ApiError(Exception):
    """A refusal with its status; `param` names the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        facts: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.facts = dict(facts or {})
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": self.param,
            "code": self.code,
        }
        if self.facts:
            error["facts"] = self.facts
        return {"error": error}


def bad_request(param: str | None, message: str, *, code: str = "invalid_value") -> ApiError:
    """Return a 400 about one field."""
    return ApiError(400, message, code=code, param=param)


def without_folders(text: str) -> str:
    """Return `text` with file names alone: where things lie is for this machine's terminal and log."""
    return _FOLDERS.sub("", text)


def internal_error() -> ApiError:
    """Return what a bug of ours looks like from outside: nothing of its insides."""
    return ApiError(500, "the server failed while answering; its log has the details", code="internal-error")


_STATUS_BY_CODE = {
    "cancelled": 503,
    "worker-busy": 503,
    "no-memory": 503,
    "numerics-not-finite": 500,
}


def api_error_of(error: VoxError) -> ApiError:
    """Return `error` as HTTP clients should see it; paths and host facts stay in the log."""
    message = without_folders(error.message if error.remedy is None else f"{error.message}. {error.remedy}")
    if isinstance(error, WorkerFailedError):
        status = _STATUS_BY_CODE.get(error.code, 503)
        # After "worker-failed" only a restart of the server helps.
        headers = {"retry-after": "1"} if status == 503 and error.code != "worker-failed" else {}
        return ApiError(status, message, code=error.code, headers=headers)
    if error.code == "context_length_exceeded":
        return ApiError(400, message, code=error.code, param="messages", facts=dict(error.facts))
    if isinstance(error, UsageError | ModelError):
        return ApiError(400, message, code=error.code)
    return ApiError(500, "the server failed while answering", code=error.code)
