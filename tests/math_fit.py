"""Where the coefficients in `codegen/llvm/math_coefficients.py` come from: `python tests/math_fit.py` prints that file.

Polynomials: Remez exchange in 60-digit arithmetic for the linear problem  f(x) ~ base(x) + Σ c_k·x^k  under a weight. The
coefficients are then rounded to the working precision from the lowest power up, the remaining ones being fitted again
after each rounding, so that rounding a coefficient does not cost its full error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mpmath as mp
import numpy as np

mp.mp.dps = 60
Number = Any
"""An mpf: mpmath has no types to name."""
Real = Callable[[Number], Number]


def remez(
    f: Real, weight: Real, low: float, high: float, powers: Sequence[int], points: int = 1200
) -> tuple[list[Number], Number]:
    """Coefficients c of Σ c_k·x^powers[k] that make max |f − Σ|·weight on [low, high] least, and that maximum."""
    low, high, n = mp.mpf(low), mp.mpf(high), len(powers)
    # Inner Chebyshev points: neither an end nor the middle, where a weight may vanish.
    grid = [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * (i + 0.5) / points) for i in range(points)]
    values, weights = [f(x) for x in grid], [weight(x) for x in grid]
    basis = [[x**p for p in powers] for x in grid]
    reference = [round((points - 1) * i / n) for i in range(n + 1)]
    coefficients, level = [], mp.mpf(0)
    for _ in range(30):
        system = mp.matrix(n + 1, n + 1)
        right = mp.matrix(n + 1, 1)
        for row, i in enumerate(reference):
            for k in range(n):
                system[row, k] = basis[i][k]
            system[row, n] = (-1) ** row / weights[i]
            right[row] = values[i]
        solution = mp.lu_solve(system, right)
        coefficients = [solution[k] for k in range(n)]
        error = [(v - mp.fdot(coefficients, b)) * w for v, b, w in zip(values, basis, weights, strict=True)]
        # One extremum for each run of equal sign; of too many, drop the smaller end.
        extrema: list[int] = []
        for i, e in enumerate(error):
            if extrema and (error[extrema[-1]] > 0) == (e > 0):
                if abs(e) > abs(error[extrema[-1]]):
                    extrema[-1] = i
            else:
                extrema.append(i)
        while len(extrema) > n + 1:
            extrema.pop(0 if abs(error[extrema[0]]) < abs(error[extrema[-1]]) else -1)
        level = max(abs(e) for e in error)
        if len(extrema) < n + 1 or extrema == reference:
            break
        reference = extrema
    return coefficients, level


def rounded(value: Number, bits: int) -> Number:
    """`value` rounded to `bits` bits of mantissa."""
    if value == 0:
        return mp.mpf(0)
    with mp.workprec(bits):
        return +value


def fit(f: Real, weight: Real, low: float, high: float, powers: Sequence[int], bits: int = 24) -> tuple[list[float], float]:
    """As `remez`, with coefficients of `bits` bits, and the weighted error."""
    coefficients, _ = remez(f, weight, low, high, powers)
    low, high, n = mp.mpf(low), mp.mpf(high), 600
    grid = [(low + high) / 2 - (high - low) / 2 * mp.cos(mp.pi * (i + 0.5) / n) for i in range(n)]
    basis = [[x**p * weight(x) for p in powers] for x in grid]
    target = [f(x) * weight(x) for x in grid]
    columns = np.array([[float(value) for value in row] for row in basis])
    for k in range(len(powers)):
        coefficients[k] = rounded(coefficients[k], bits)
        error = [t - mp.fdot(coefficients, row) for t, row in zip(target, basis, strict=True)]
        if k + 1 == len(powers):
            return [float(c) for c in coefficients], float(max(abs(e) for e in error))
        # The others move a little to make up for it: Lawson's reweighted least squares on what is left.
        scale = max(abs(e) for e in error)
        left = np.array([float(e / scale) for e in error])
        norms = np.linalg.norm(columns[:, k + 1 :], axis=0)
        lawson, best = np.ones(n), (1.0, np.zeros(len(norms)))
        for _ in range(150):
            root = np.sqrt(lawson)
            step = np.linalg.lstsq(columns[:, k + 1 :] / norms * root[:, None], left * root, rcond=None)[0] / norms
            now = np.abs(left - columns[:, k + 1 :] @ step)
            if now.max() < best[0]:
                best = (now.max(), step)
            lawson = lawson * (now / now.max() + 1e-4)
            lawson /= lawson.sum()
        for j, value in enumerate(best[1]):
            coefficients[k + 1 + j] += mp.mpf(float(value)) * scale
    raise AssertionError("no coefficients")


def tables() -> dict[str, tuple[list[float], float, str]]:
    """Each table of `math_coefficients.py`: its values, the error of the fit and what is fitted."""
    ln2, half_ln2 = mp.log(2), float(mp.log(2) / 2) * 1.0001
    root = float(mp.sqrt(2))
    result: dict[str, tuple[list[float], float, str]] = {}

    def polynomial(name: str, text: str, f: Real, weight: Real, low: float, high: float, degree: int, bits: int = 24) -> None:
        values, error = fit(f, weight, low, high, range(degree + 1), bits)
        result[name] = (values, error, text)

    def power(x: Number) -> Number:
        return mp.exp(x * ln2)

    def small(value: Number) -> Number:
        return value if abs(value) > mp.mpf(10) ** -15 else mp.mpf(10) ** -15

    def exp2_part(x: Number) -> Number:
        return mp.expm1(small(x) * ln2) / small(x)

    def expm1_part(x: Number) -> Number:
        return (mp.expm1(small(x)) - small(x)) / small(x) ** 2

    polynomial("SOFTMAX_EXP2", "(2^x - 1)/x", exp2_part, lambda x: abs(x) / power(x), -0.5, 0.5, 4)
    polynomial("EXP2", "(2^x - 1)/x", exp2_part, lambda x: abs(x) / power(x), -0.5, 0.5, 5)
    polynomial("EXPM1", "(e^x - 1 - x)/x^2", expm1_part, lambda x: abs(x), -half_ln2, half_ln2, 4)
    polynomial("EXPM1_DOUBLE", "(e^x - 1 - x)/x^2", expm1_part, lambda x: abs(x), -half_ln2, half_ln2, 9, 53)
    polynomial("POW_EXP", "(e^x - 1 - x)/x^2", expm1_part, lambda x: x * x, -half_ln2, half_ln2, 5, 53)

    for name, scale, text in (("LOG", mp.mpf(1), "ln"), ("LOG2", 1 / ln2, "log2"), ("LOG10", 1 / mp.log(10), "log10")):
        first = rounded(scale, 24)
        second = rounded(scale - first, 24)

        def log_part(x: Number, scale: Number = scale, known: Number = first + second) -> Number:
            return (mp.log1p(small(x)) * scale - known * small(x)) / small(x) ** 2

        def log_weight(x: Number, scale: Number = scale) -> Number:
            return small(x) ** 2 / abs(mp.log1p(small(x)) * scale)

        values, error = fit(log_part, log_weight, 1 / root - 1, root - 1, range(9))
        result[name] = ([float(first), float(second), *values], error, f"{text}(1 + x) = x·(first + second) + x^2·P(x)")

    def atanh_part(z: Number) -> Number:
        s = mp.sqrt(small(z))
        return (2 * mp.atanh(s) / s - 2) / s**2

    limit = float(((root - 1) / (root + 1)) ** 2)
    polynomial("LOG_DOUBLE", "(2·atanh(s) - 2s)/s^3 in s^2", atanh_part, lambda z: z, 0, limit, 6, 53)
    polynomial("POW_LOG", "the same", atanh_part, lambda z: z, 0, limit, 4, 53)

    def odd(f: Real) -> Real:
        return lambda z: (f(mp.sqrt(small(z))) / mp.sqrt(small(z)) - 1) / small(z)

    def odd_weight(f: Real) -> Real:
        return lambda z: small(z) * mp.sqrt(small(z)) / f(mp.sqrt(small(z)))

    quarter = float(mp.pi / 4) ** 2 * 1.0001
    polynomial("SIN", "(sin x - x)/x^3 in x^2", odd(mp.sin), odd_weight(mp.sin), 0, quarter, 2)
    polynomial(
        "COS", "(cos x - 1 + x^2/2)/x^4 in x^2",
        lambda z: (mp.cos(mp.sqrt(small(z))) - 1 + small(z) / 2) / small(z) ** 2,
        lambda z: z * z / mp.cos(mp.sqrt(z)), 0, quarter, 2,
    )  # fmt: skip
    polynomial("ASIN", "(asin x - x)/x^3 in x^2", odd(mp.asin), odd_weight(mp.asin), 0, 0.25, 4)
    polynomial("ATAN", "(atan x - x)/x^3 in x^2", odd(mp.atan), odd_weight(mp.atan), 0, 1, 8)
    polynomial("SINH", "(sinh x - x)/x^3 in x^2", odd(mp.sinh), odd_weight(mp.sinh), 0, 1, 3)

    polynomial(
        "ERF", "log2(1 - erf x)/x",
        lambda x: mp.log(mp.erfc(x), 2) / x, lambda x: x * ln2 * mp.erfc(x) / mp.erf(x), 0, 3.95, 8,
    )  # fmt: skip
    return result


if __name__ == "__main__":
    print(
        '"""Coefficients, lowest power first, printed by tests/math_fit.py, with the largest relative error of each fit."""\n'
    )
    for name, (values, error, text) in tables().items():
        print(f"# {text}: {error:.1e}")
        print(f"{name} = (\n" + "".join(f"    {value!r},\n" for value in values) + ")")
