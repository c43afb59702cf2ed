"""Whether this GPU's SIMD-group matrices may be used: what a probe finds, checked, and remembered.

Apple says nothing of the order in which they add. They are used where a probe finds the one chain that
docs/numerics.md has, and their tiles then give the bytes of the scalar kernels; else scalar kernels run.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Device, Launch, constants
from mens_core.kernel_source import GROUP
from mens_core.philox import philox_words
from mens_torch_mps.matrix_orders import CANONICAL, VECTORS, classify

__all__ = ["TILE", "Found", "cache_file", "probe", "recall", "remember", "tiles_agree"]

TILE = 32
"""Rows, and outputs, of a group: kMatrixTile of kernels/matrices.h."""
_SIDE = 8
_SIMD_WIDTH = 32
"""The only width that matrices of 64 elements, two a thread, are known at."""
_CHECKED = (37, 392, 50)
"""Rows, columns and outputs that are compared: none is whole tiles, and three chunks and an eighth."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the probe found."""

    order: str
    """Of `matrix_orders.ORDERS`, or what kept the probe from finding one."""
    is_usable: bool
    is_remembered: bool = False

    def described(self) -> str:
        """Say it, for the load report."""
        said = f"{self.order}{' (remembered)' if self.is_remembered else ''}"
        return f"used: {said}" if self.is_usable else f"not used, scalar tiles instead: {said}"


def probe(device: Device, simd_width: int) -> Found:
    """Find the order in which they add; the kernels of matrices are on the device."""
    if simd_width != _SIMD_WIDTH:
        return Found(f"SIMD groups of {simd_width} threads", False)
    count, shape = len(VECTORS), (len(VECTORS), _SIDE, _SIDE)
    a, b, c = (np.empty(shape, np.float32) for _ in range(3))
    for i, operands in enumerate(VECTORS):
        # Every row of a, every column of b: so each of the 64 elements is the same sum, in another place.
        a[i], b[i], c[i] = operands.a, np.array(operands.b)[:, None], operands.c
    out = device.zeros(a.nbytes)
    device.launch(
        Launch(
            "vox_matrix_probe",
            (*(device.put(array) for array in (a, b, c)), out),
            constants(count),
            (-(-count // (GROUP // simd_width)) * GROUP, 1),
        )
    )
    found = device.get(out, np.uint32, (count, _SIDE * _SIDE))
    order = classify(found.tolist())
    if order != CANONICAL:
        return Found(order, False)
    differing = tiles_agree(device)
    return Found(f"{order}, but tiles of {differing} differ", False) if differing else Found(order, True)


def tiles_agree(device: Device) -> str:
    """Compare tiles with scalar kernels on drawn operands; return the first format that differs, or ''."""
    rows, columns, outputs = _CHECKED
    x = _drawn(1, rows * columns)
    for name, weight in (
        ("f32", _drawn(2, outputs * columns)),
        ("f16", (_drawn(3, outputs * columns)).astype(np.float16)),
        ("bf16", (_drawn(4, outputs * columns).view(np.uint32) >> 16).astype(np.uint16)),
    ):
        operands = device.put(x), device.put(weight)
        made = [device.zeros(4 * rows * outputs) for _ in range(2)]
        flags = device.zeros(4 * rows)
        device.launch(
            Launch(
                f"vox_linear_{name}",
                (*operands, made[0], flags),
                constants(outputs, columns),
                (outputs, rows),
            )
        )
        device.launch(
            Launch(
                f"vox_matrices_{name}",
                (*operands, made[1], flags),
                constants(rows, columns, outputs, 0, columns),
                (-(-outputs // TILE) * GROUP, -(-rows // TILE)),
            )
        )
        scalar, tiled = (device.get(out, np.uint32, (rows, outputs)) for out in made)
        if scalar.tobytes() != tiled.tobytes():
            return name
    return ""


def _drawn(stream: int, count: int) -> npt.NDArray[np.float32]:
    """Numbers of 16 binades around 1 and either sign."""
    words = philox_words(0x7117, stream, 3, count).astype(np.uint32)
    exponents = (np.uint32(119) + (words >> 27 & 0xF)) << 23
    return ((words & np.uint32(0x807FFFFF)) | exponents).astype(np.uint32).view(np.float32)


# --- what is remembered ------------------------------------------------------------------------------------


def cache_file(environment: Mapping[str, str], facts: Mapping[str, Any], source: str) -> Path | None:
    """Return where what this chip, system build, torch and source are is kept; None: nothing names them."""
    if not facts.get("os_build") or not facts.get("device"):
        return None
    named = [str(facts.get(name, "")) for name in ("device", "os_build", "torch", "simd_width", "execution")]
    digest = hashlib.sha256("\n".join([*named, source]).encode()).hexdigest()
    root = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME", "/tmp"), ".cache"))  # noqa: S108
    return Path(root, "mens-torch-mps", f"matrices-{digest[:32]}.json")


def recall(path: Path | None) -> Found | None:
    """Return what was found before; None where nothing was, or what is there can't be read."""
    if path is None:
        return None
    try:
        said = json.loads(path.read_text("utf-8"))
        order, is_usable = said["order"], said["is_usable"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # No probe calls another order usable, and so no file does.
    if not isinstance(order, str) or not isinstance(is_usable, bool) or (is_usable and order != CANONICAL):
        return None
    return Found(order, is_usable, is_remembered=True)


def remember(path: Path | None, found: Found) -> None:
    """Write aside and rename; a folder that can't be written costs the next start a probe."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".aside-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"order": found.order, "is_usable": found.is_usable}, file)
        Path(aside).replace(path)
    except OSError:
        return
