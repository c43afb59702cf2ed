"""Eight operations at every start that tell what a compiler or a GPU does to float arithmetic.

The self-test compares whole operators, most of whose rounding a forbidden change leaves alone. Here each
operand is one where the change shows, and the error says which change it was.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mens_core.grid_device import Device, Launch, constants
from vox_plugin_api.backend import BackendError

__all__ = ["TRIPWIRES", "Tripwire", "check_tripwires"]


class Tripwire(NamedTuple):
    """Operands and result as the bits of float32."""

    name: str
    a: int
    b: int
    c: int
    expected: int
    otherwise: str
    """What another result means."""


TRIPWIRES = (
    Tripwire(
        "product_and_sum", 0x3EB97EF9, 0x3FC00000, 0x3F800000, 0x3FC58F9E, "products and sums are fused"
    ),
    Tripwire("two_sums", 0x3F800000, 0x33800000, 0x33800000, 0x3F800000, "sums are reordered"),
    Tripwire("fma", 0x3F800800, 0x3F800800, 0xBF801000, 0x33800000, "fma rounds twice"),
    Tripwire("product", 0x00800000, 0x3F000000, 0, 0x00000000, "subnormal results are kept"),
    Tripwire("product", 0x00400000, 0x7E800000, 0, 0x00000000, "subnormal operands are kept"),
    Tripwire("quotient", 0x3FA21F88, 0x3F84C6C9, 0, 0x3F9C4A7C, "division is not correctly rounded"),
    Tripwire("root", 0x402A177F, 0, 0, 0x3FD0ABB9, "the square root is not correctly rounded"),
    Tripwire("sum_less_term", 0x4B800000, 0x3F800000, 0x4B800000, 0x00000000, "sums are simplified"),
)
"""By the kernels of kernels/tripwires.h."""


def check_tripwires(device: Device, facts: dict[str, Any]) -> None:
    """Run them.

    Raises:
        BackendError: `arithmetic-not-exact`, with every operation that came out otherwise.
    """
    outs = []
    for t in TRIPWIRES:
        operands, out = device.put(np.array([t.a, t.b, t.c], np.uint32)), device.zeros(4)
        device.launch(Launch(f"vox_tripwire_{t.name}", (operands, out), constants(1), (1, 1)))
        outs.append(out)
    found = [int(device.get(out, np.uint32, (1,))[0]) for out in outs]
    wrong = [(t, bits) for t, bits in zip(TRIPWIRES, found, strict=True) if bits != t.expected]
    if wrong:
        shown = "; ".join(
            f"{t.name}: expected {t.expected:08x}, found {bits:08x}: {t.otherwise}" for t, bits in wrong
        )
        raise BackendError(
            "arithmetic-not-exact",
            f"the compiled kernels do not compute as the rules say ({shown}); the Metal lane was not started",
            facts={**facts, "operations": [t.otherwise for t, _ in wrong]},
            remedy="Use the CPU lane; and report this with the macOS build (`sw_vers`) and the chip.",
        )
