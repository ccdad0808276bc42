"""Writes modules with one `iree_linalg_ext.attention` of any domain as IREE's text, and runs them.

`AttentionModule` says which dims the operands have, by letters of roles: "b…" batch, "m…" rows, "k…" keys, "e…" head dims,
"n…" value columns; a "1" is a unit dimension (a constant 0 in the map).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from attnc.mlir_text import parse_module
from attnc.target import Target
from attnc.transforms import attention_to_linalg
from linalg_interpreter import run_function

MINUS_INFINITY = {"f32": "0xFF800000", "f64": "0xFFF0000000000000", "f16": "0xFC00", "bf16": "0xFF80"}


@dataclass
class AttentionModule:
    """One attention. `sizes` gives each dim's size; dims in `dynamic` are `?` in the types. `region` is text that computes
    `%x` from `%s` and the positions `%i_<dim>` it asks for; "" leaves the score alone. `captures` are (name, type)."""

    sizes: dict[str, int]
    query: Sequence[str]
    key: Sequence[str]
    value: Sequence[str]
    out: Sequence[str]
    mask: Sequence[str] | None = None
    element: str = "f32"
    mask_element: str = "i1"
    region: str = ""
    scale: float = 0.25
    dynamic: Sequence[str] = ()
    captures: Sequence[tuple[str, str]] = ()
    out_element: str | None = None
    domain: Sequence[str] = field(default_factory=list)
    generic: bool = False

    @property
    def score(self) -> str:
        return "f64" if self.element == "f64" else "f32"

    def __post_init__(self) -> None:
        self.domain = self.domain or list(self.sizes)

    def type_of(self, dims: Sequence[str], element: str) -> str:
        sizes = ["1" if d == "1" else "?" if d in self.dynamic else str(self.sizes[d]) for d in dims]
        return f"tensor<{'x'.join([*sizes, element])}>"

    def map_of(self, dims: Sequence[str]) -> str:
        results = ", ".join("0" if d == "1" else d for d in dims)
        return f"affine_map<({', '.join(self.domain)}) -> ({results})>"

    def shape(self, dims: Sequence[str]) -> tuple[int, ...]:
        return tuple(1 if d == "1" else self.sizes[d] for d in dims)

    def text(self) -> str:
        operands = [("q", self.query, self.element), ("k", self.key, self.element), ("v", self.value, self.element)]
        if self.mask is not None:
            operands.append(("mask", self.mask, self.mask_element))
        out_type = self.type_of(self.out, self.out_element or self.element)
        arguments = [f"%{name}: {self.type_of(dims, element)}" for name, dims, element in operands]
        arguments += [f"%{name}: {type_}" for name, type_ in self.captures]
        lines, dynamic = [], []
        for n, d in enumerate(self.out):
            if d in self.dynamic:
                name, place = self._holder(d)
                lines.append(f"%at{n} = arith.constant {place} : index")
                lines.append(f"%size{n} = tensor.dim %{name[0]}, %at{n} : {self.type_of(name[1], name[2])}")
                dynamic.append(f"%size{n}")
        maps = [self.map_of(dims) for _, dims, _ in operands]
        maps.insert(3, self.map_of([]))
        maps.append(self.map_of(self.out))
        names = [f"%{name}" for name, *_ in operands]
        types = [self.type_of(dims, element) for _, dims, element in operands]
        names.insert(3, "%scale")
        types.insert(3, self.score)
        positions = [f"%i_{d}" for d in self.domain if f"%i_{d}" in self.region]
        region = [f"^bb0(%s: {self.score}):"]
        for position in positions:
            dim = list(self.domain).index(position.removeprefix("%i_"))
            region.append(f"{position} = iree_linalg_ext.index {dim} : index")
        region.append(self.region)
        region.append(f"iree_linalg_ext.yield {'%x' if self.region else '%s'} : {self.score}")
        inside = "\n        ".join(line for line in region if line)
        body = "\n    ".join(lines)
        return f"""module {{
  func.func @main({", ".join(arguments)}) -> {out_type} {{
    {body}
    %scale = arith.constant {self.scale} : {self.score}
    %ninf = arith.constant {MINUS_INFINITY[self.score]} : {self.score}
    %init = tensor.empty({", ".join(dynamic)}) : {out_type}
    %r = iree_linalg_ext.attention {{indexing_maps = [{", ".join(maps)}]}}
      ins({", ".join(names)} : {", ".join(types)}) outs(%init : {out_type}) {{
        {inside}
      }} -> {out_type}
    return %r : {out_type}
  }}
}}
"""

    def _holder(self, dim: str) -> tuple[tuple[str, Sequence[str], str], int]:
        for name, dims in (("q", self.query), ("k", self.key), ("v", self.value)):
            if dim in dims:
                return (name, dims, self.element), list(dims).index(dim)
        raise AssertionError(dim)

    def inputs(self, seed: int = 0) -> list[np.ndarray]:
        """Normal random numbers that the element types hold exactly; masks with most keys alive."""
        rng = np.random.default_rng(seed)
        arrays = [
            as_element(rng.standard_normal(self.shape(dims)), self.element) for dims in (self.query, self.key, self.value)
        ]
        if self.mask is not None:
            shape = self.shape(self.mask)
            if self.mask_element.startswith("i"):
                mask = rng.random(shape) < 0.7
                arrays.append(mask if self.mask_element == "i1" else (mask * 3).astype(f"int{self.mask_element[1:]}"))
            else:
                arrays.append(as_element(rng.standard_normal(shape), self.mask_element))
        return arrays


def as_element(array: np.ndarray, element: str) -> np.ndarray:
    """`array` in an element type; bf16 by ml_dtypes."""
    if element == "bf16":
        import ml_dtypes

        return array.astype(ml_dtypes.bfloat16)
    return array.astype({"f64": np.float64, "f32": np.float32, "f16": np.float16}[element])


def exact(text: str, inputs: Sequence[np.ndarray], function: str = "main") -> list[np.ndarray]:
    """What the module means, in f64."""
    module = parse_module(text)
    given = [array.astype(np.float32) if array.dtype.name == "bfloat16" else array for array in inputs]
    return run_function(module, function, given, exact=True)


EPS = {"f64": 2.0**-52, "f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


def close(actual: np.ndarray, wanted: np.ndarray, element: str, what: str = "", factor: float = 12.0) -> None:
    """Asserts that a result is right but for rounding, and not finite exactly where it should be."""
    actual, wanted = np.asarray(actual).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert actual.shape == wanted.shape, f"{what}: shape {actual.shape}, not {wanted.shape}"
    finite = np.isfinite(wanted)
    assert np.array_equal(actual[~finite], wanted[~finite], equal_nan=True), f"{what}: not finite elsewhere"
    if finite.any():
        error = np.abs(actual - wanted)[finite].max()
        allowed = factor * EPS[element] * max(1.0, np.abs(wanted[finite]).max())
        assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}"


def eager(text: str, inputs: Sequence[np.ndarray], function: str = "main") -> list[np.ndarray]:
    """What the module gives when attention is written out and every operation is rounded to its own type."""
    module = parse_module(text)
    attention_to_linalg.run(module, Target.host())
    given = [array.astype(np.float32) if array.dtype.name == "bfloat16" else array for array in inputs]
    return run_function(module, function, given)


def judge(text: str, inputs: Sequence[np.ndarray], actual: Any, element: str) -> None:
    """SPEC's rule of accuracy: at most 1.5 times as wrong as `eager`, plus 4 eps; not finite exactly where it should be."""
    wanted, plain = exact(text, inputs)[0], eager(text, inputs)[0]
    actual = np.asarray(actual).astype(np.float64)
    assert actual.shape == wanted.shape, f"shape {actual.shape}, not {wanted.shape}\n{text}"
    finite = np.isfinite(wanted)
    assert np.array_equal(actual[~finite], wanted[~finite], equal_nan=True), f"not finite elsewhere\n{text}"
    if finite.any():
        error, allowed = np.abs(actual - wanted)[finite].max(), np.abs(plain.astype(np.float64) - wanted)[finite].max()
        allowed = 1.5 * allowed + 4 * EPS[element] * max(1.0, np.abs(wanted[finite]).max())
        assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}\n{text}"


# -- modules by chance ----------------------------------------------------------------------------------------------------


@st.composite
def modules(draw: st.DrawFn, simple: bool = False) -> AttentionModule:
    """Any attention: up to three batch dims and three rows, two keys, head dims and columns, in any order; operands that lack a
    batch dim; unit dims; regions, masks, element types, dynamic sizes. `simple` leaves out what IREE does not compile."""
    counts = {"b": 2 if simple else 3, "m": 2 if simple else 3, "k": 2, "e": 2, "n": 2}
    least = {"b": 0, "m": 0, "k": 1, "e": 1, "n": 0}
    sizes: dict[str, int] = {}
    roles: dict[str, list[str]] = {}
    for role, most in counts.items():
        roles[role] = [f"{role}{n}" for n in range(draw(st.integers(least[role], most)))]
        for dim in roles[role]:
            sizes[dim] = draw(st.integers(1, 40 if role in "mk" and len(roles[role]) == 1 else 7))
    batch = roles["b"]
    lacking: dict[str, set[str]] = {"q": set(), "k": set(), "v": set()}
    for dim in batch:
        lacks = draw(st.sampled_from(["", "", "", "q", "k", "v"]))
        if lacks:
            lacking[lacks].add(dim)

    def operand(name: str, *groups: str) -> list[str]:
        dims = [dim for group in groups for dim in roles[group] if dim not in lacking.get(name, set())]
        if draw(st.booleans()) and len(dims) < 6 and draw(st.integers(0, 4)) == 0:
            dims.append("1")
        return draw(st.permutations(dims))

    element = draw(st.sampled_from(["f32", "f32", "f16"] if simple else ["f32", "f32", "f16", "bf16", "f64"]))
    score = "f64" if element == "f64" else "f32"
    lines: list[str] = []
    kind = draw(st.sampled_from(["", "causal", "cap", "bias", "cap causal"]))
    value = "%s"
    if "cap" in kind:
        lines += [f"%cap = arith.constant 2.0 : {score}", f"%cd = arith.divf {value}, %cap : {score}"]
        lines += [f"%ct = math.tanh %cd : {score}", f"%cx = arith.mulf %ct, %cap : {score}"]
        value = "%cx"
    if "bias" in kind:
        total = "%z0"
        lines.append("%z0 = arith.constant 0 : index")
        for n, dim in enumerate([*batch, *roles["m"], *roles["k"]]):
            lines += [f"%w{n} = arith.constant {n + 1} : index", f"%p{n} = arith.muli %i_{dim}, %w{n} : index"]
            lines.append(f"%a{n} = arith.addi {total}, %p{n} : index")
            total = f"%a{n}"
        lines += [f"%bi = arith.index_cast {total} : index to i32", f"%bf = arith.sitofp %bi : i32 to {score}"]
        lines += [f"%bc = arith.constant 0.0625 : {score}", f"%bb = arith.mulf %bf, %bc : {score}"]
        lines.append(f"%bx = arith.addf {value}, %bb : {score}")
        value = "%bx"
    if "causal" in kind and roles["m"]:
        row, key = draw(st.sampled_from(roles["m"])), draw(st.sampled_from(roles["k"]))
        lines.append(f"%c = arith.cmpi {draw(st.sampled_from(['sge', 'sle', 'ne']))}, %i_{row}, %i_{key} : index")
        lines.append(f"%cm = arith.select %c, {value}, %ninf : {score}")
        value = "%cm"
    region = "\n".join(lines).replace(f"{value} =", "%x =") if value != "%s" else ""
    mask = None
    if draw(st.integers(0, 2)) == 0:
        candidates = [*batch, *roles["m"], *roles["k"]]
        mask = draw(st.permutations([dim for dim in candidates if draw(st.integers(0, 3))]))
    query, key, value_dims = operand("q", "b", "m", "e"), operand("k", "b", "k", "e"), operand("v", "b", "k", "n")
    out = draw(st.permutations([*batch, *roles["m"], *roles["n"]]))
    dynamic = [] if simple else [dim for dim in sizes if draw(st.integers(0, 5)) == 0]
    mask_element = draw(st.sampled_from(["i1", "i8", "f32"] if not simple else ["i1"]))
    return AttentionModule(
        sizes, query, key, value_dims, out, mask, element, mask_element, region,
        scale=draw(st.sampled_from([0.25, 0.5, 1.0])), dynamic=dynamic, domain=draw(st.permutations(list(sizes))),
    )  # fmt: skip
