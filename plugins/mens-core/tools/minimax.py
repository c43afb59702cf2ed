"""Derive the polynomial constants of docs/numerics.md: exp, log and tanh.

Needs mpmath. Prints each coefficient as float32 bits, highest power first, with the largest
relative error of the polynomial before any rounding of the evaluation:

    python plugins/mens-core/tools/minimax.py

Coefficients are found one after the other from the lowest power: the minimax polynomial over
those still free is computed (Remez exchange), its lowest coefficient is rounded to float32 and
fixed, and the rest is fitted again around it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import mpmath as mp

Real = Callable[[mp.mpf], mp.mpf]


def nearest_float(x: mp.mpf) -> mp.mpf:
    return mp.mpf(struct.unpack("<f", struct.pack("<f", float(x)))[0])


def bits(x: mp.mpf) -> str:
    return f"{struct.unpack('<I', struct.pack('<f', float(x)))[0]:08X}"


def remez(target: Real, basis: Sequence[Real], low: mp.mpf, high: mp.mpf) -> tuple[list[mp.mpf], mp.mpf]:
    """Minimise the largest |target(x) - sum c_k basis_k(x)| on [low, high]."""
    n = len(basis)
    points = [
        (low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * mp.mpf(2 * i + 1) / (2 * n + 2))
        for i in range(n + 1)
    ]
    grid = [low + (high - low) * mp.mpf(i) / 1500 for i in range(1501)]
    coefficients: list[mp.mpf] = []
    for _ in range(30):
        rows = [[phi(x) for phi in basis] + [(-1) ** i] for i, x in enumerate(points)]
        solution = mp.lu_solve(mp.matrix(rows), mp.matrix([target(x) for x in points]))
        coefficients, level = list(solution)[:n], abs(solution[n])
        errors = [
            target(x) - mp.fsum(c * phi(x) for c, phi in zip(coefficients, basis, strict=True)) for x in grid
        ]
        extrema: list[int] = []
        for i, error in enumerate(errors):
            if extrema and (error > 0) == (errors[extrema[-1]] > 0):
                if abs(error) > abs(errors[extrema[-1]]):
                    extrema[-1] = i
            else:
                extrema.append(i)
        while len(extrema) > n + 1:
            extrema.pop(0 if abs(errors[extrema[0]]) < abs(errors[extrema[-1]]) else -1)
        worst = max(abs(error) for error in errors)
        if len(extrema) < n + 1 or worst < level * mp.mpf("1.0005"):
            return coefficients, worst
        points = [grid[i] for i in extrema]
    return coefficients, worst


def fit(name: str, target: Real, weight: Real, powers: Sequence[int], low: mp.mpf, high: mp.mpf) -> None:
    """target ~ sum c_k x^k over `powers`; `weight` turns that error into the function's relative error."""
    fixed: list[tuple[int, mp.mpf]] = []
    for i in range(len(powers)):
        free = powers[i:]

        def rest(x: mp.mpf) -> mp.mpf:
            return (target(x) - mp.fsum(c * x**k for k, c in fixed)) * weight(x)

        coefficients, _ = remez(rest, [lambda x, k=k: x**k * weight(x) for k in free], low, high)
        fixed.append((powers[i], nearest_float(coefficients[0])))
    grid = [low + (high - low) * mp.mpf(i) / 3000 for i in range(3001)]
    worst = max(abs((target(x) - mp.fsum(c * x**k for k, c in fixed)) * weight(x)) for x in grid)
    print(name, "relative error", mp.nstr(worst, 4), "= 2^", mp.nstr(mp.log(worst, 2), 5))
    for power, c in reversed(fixed):
        print(f"  x^{power}: {bits(c)}  {mp.nstr(c, 10)}")


def main() -> None:
    mp.mp.dps = 50
    half = mp.log(2) / 2 * mp.mpf("1.0001")
    tiny = mp.mpf(10) ** -12  # keeps removable singularities off the grid

    # exp(r) = 1 + r (1 + r P(r))
    fit(
        "exp P",
        lambda r: (mp.expm1(r + tiny) - (r + tiny)) / (r + tiny) ** 2,
        lambda r: r * r / mp.exp(r),
        range(5),
        -half,
        half,
    )
    # log(1 + f) = f - f^2 / 2 + f^3 P(f)
    fit(
        "log P",
        lambda f: (mp.log1p(f + tiny) - (f + tiny) + (f + tiny) ** 2 / 2) / (f + tiny) ** 3,
        lambda f: (f + tiny) ** 3 / mp.log1p(f + tiny),
        range(9),
        mp.sqrt(mp.mpf(1) / 2) - 1,
        mp.sqrt(2) - 1,
    )
    # tanh(x) = x + x z P(z), z = x^2
    fit(
        "tanh P",
        lambda z: (mp.tanh(mp.sqrt(z + tiny)) / mp.sqrt(z + tiny) - 1) / (z + tiny),
        lambda z: (z + tiny) * mp.sqrt(z + tiny) / mp.tanh(mp.sqrt(z + tiny)),
        range(5),
        mp.mpf(0),
        mp.mpf("0.625") ** 2,
    )
    log2 = mp.log(2)
    high = mp.mpf(int(log2 * 2**15)) / 2**15
    print("ln2 high, 15 bits:", bits(high), " low:", bits(nearest_float(log2 - high)))
    print("log2(e):", bits(nearest_float(1 / log2)))
    for label, value in (
        ("-2c", -2 * mp.sqrt(2 / mp.pi)),
        ("-2c*0.044715", -2 * mp.sqrt(2 / mp.pi) * mp.mpf("0.044715")),
    ):
        print("gelu", label, bits(nearest_float(value)))


if __name__ == "__main__":
    main()
