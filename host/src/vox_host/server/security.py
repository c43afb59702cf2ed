"""Who may ask: the API key, the Host header, and which web pages.

A server on loopback is reachable by every web page the user opens. So the Host header must name
loopback (else a DNS name that was rebound to 127.0.0.1 would do), a foreign Origin is refused,
and only pages served from this machine get CORS headers.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from vox_host.errors import UsageError
from vox_host.server.api_error import ApiError

__all__ = ["Access", "check_binding", "is_loopback"]

_PUBLIC = frozenset({"/health", "/v1/health"})


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_binding(host: str, api_key: str | None) -> None:
    """Refuse to listen to the network without a key.

    Raises:
        UsageError: `host` is beyond loopback and there is no key.
    """
    if not is_loopback(host) and not api_key:
        raise UsageError(
            "api-key-needed",
            f"listening on {host or 'every address'} lets others on the network use this model; "
            "the server was not started",
            remedy="Give --api-key (or set VOX_API_KEY), or leave --host at 127.0.0.1.",
        )


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    api_key: str | None
    checks_host: bool
    """True on loopback, where the name in the Host header is known."""

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Refuse a request that may not be answered.

        Raises:
            ApiError: 401 without the key, 403 for a foreign Host or Origin.
        """
        host = headers.get("Host", "")
        if self.checks_host and not is_loopback(_host_name(host)):
            raise ApiError(
                403,
                f'the Host header names "{host[:100]}"; this server answers to localhost only',
                code="host_not_allowed",
            )
        origin = headers.get("Origin")
        if origin is not None and not is_local_origin(origin) and method != "OPTIONS":
            raise ApiError(
                403, f"web pages of {origin[:100]} may not use this server", code="origin_not_allowed"
            )
        if self.api_key is None or path in _PUBLIC or method == "OPTIONS":
            return
        for given in _given_keys(headers):
            if hmac.compare_digest(given.encode("utf-8", "replace"), self.api_key.encode()):
                return
        raise ApiError(
            401,
            "the API key is missing or wrong; send it as Authorization: Bearer KEY or X-Api-Key: KEY",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def is_local_origin(origin: str) -> bool:
    """Whether a page's origin is this machine."""
    try:
        parts = urlsplit(origin)
        name = parts.hostname
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and name is not None and is_loopback(name)


def cors_headers(origin: str | None) -> dict[str, str]:
    """Return the headers a page of this machine needs."""
    if origin is None or not is_local_origin(origin):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
        "Access-Control-Allow-Headers": "Authorization, Content-Type, X-Api-Key, X-Request-Id",
        "Access-Control-Expose-Headers": "X-Request-Id, X-Vox-Seed, X-Vox-Plugin, X-Vox-Lane, Retry-After",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }


def _host_name(header: str) -> str:
    """Return the name of a Host header without its port."""
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::\d+)?", header.strip())
    return found[1] if found else ""


def _given_keys(headers: Mapping[str, str]) -> list[str]:
    keys = []
    authorization = headers.get("Authorization", "")
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        keys.append(value.strip())
    if "X-Api-Key" in headers:
        keys.append(headers["X-Api-Key"].strip())
    return keys
