"""Undo a request's Content-Encoding, never past the limit a body has.

The HTTP library is told to leave bodies as they came: it inflates what arrives as a whole, so a
small body could take any amount of memory before its size is seen.
"""

from __future__ import annotations

import zlib

from vox_host.server.api_error import ApiError

__all__ = ["BodyTooLargeError", "decoded", "known_encoding"]

_GZIP_BITS = 16 + zlib.MAX_WBITS
_ZLIB_BITS = zlib.MAX_WBITS
_RAW_BITS = -zlib.MAX_WBITS
_NAMES = {"": "identity", "identity": "identity", "gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


class BodyTooLargeError(Exception):
    """The decoded body would be larger than the limit."""


def known_encoding(header: str | None) -> str:
    """Return "identity", "gzip" or "deflate".

    Raises:
        ApiError: 415, it is none of these.
    """
    encoding = _NAMES.get((header or "").strip().lower())
    if encoding is None:
        raise ApiError(
            415,
            f'the Content-Encoding "{(header or "")[:60]}" is not one this server reads; '
            "it takes gzip, deflate or none",
            code="unsupported_content_encoding",
            headers={"Accept-Encoding": "gzip, deflate"},
        )
    return encoding


def decoded(data: bytes, encoding: str, limit: int) -> bytes:
    """Return the body that `data` encodes, at most `limit` bytes of it ever held.

    Raises:
        ApiError: 400, the bytes are not of this encoding or end too early.
        BodyTooLargeError: it has more than `limit` bytes.
    """
    if encoding == "identity" or not data:
        return data
    bits = _GZIP_BITS
    if encoding == "deflate":
        # Meant is zlib's format; some clients send the bare stream. A zlib header is divisible by 31.
        has_header = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
        bits = _ZLIB_BITS if has_header else _RAW_BITS
    whole = bytearray()
    while True:
        inflater = zlib.decompressobj(bits)
        try:
            whole += inflater.decompress(data, limit + 1 - len(whole))
        except zlib.error:
            raise _undecodable(encoding, "it is not") from None
        if len(whole) > limit:
            raise BodyTooLargeError
        if not inflater.eof:
            raise _undecodable(encoding, "it ends too early")
        data = inflater.unused_data
        if not data:
            return bytes(whole)
        if encoding != "gzip":
            raise _undecodable(encoding, "other bytes follow it")
        # A gzip file may have several members, which join.


def _undecodable(encoding: str, why: str) -> ApiError:
    return ApiError(
        400,
        f"the body can't be decoded: Content-Encoding says {encoding}, and {why}",
        code="undecodable_body",
    )
