"""Writes docs/operations.md from the compiler's table of ATen operations. `python tools/write_operations.py`"""

from __future__ import annotations

from pathlib import Path

from attnc.transforms import convert_torch_to_linalg_ext  # noqa: F401  (fills the table)
from attnc.transforms.convert_torch_to_linalg_ext_table import OPERATIONS, Entry

PATH = Path(__file__).parent.parent / "docs" / "operations.md"
KINDS = {
    "elementwise": "Element by element, with broadcasting",
    "tensor": "On tensors with dimensions too",
    "number": "On Python numbers",
}
HEAD = """# What a mod may use

Written by `tools/write_operations.py` from the table in the compiler (`convert_torch_to_linalg_ext_*.py`). Do not edit.

A `score_mod` or `mask_mod` is torch code over scalars: elementwise operations, gathers from captured tensors, reductions of a
gathered row. Below are the ATen operations that such code may reach, whatever Python spelling leads there (`x ** 2`,
`x.square()`, `torch.square(x)`, `x.square_()` on a value of the mod's own). Anything else is refused by name, with the mod's
file and line.

Every operation has torch's promoted dtype and is rounded to it. Half types are computed in float32 and rounded after each
operation. Ints wrap; `//` and `%` round down, and a zero divisor is an error of the call, as in torch. Float to int cuts off;
what does not fit the int is unspecified, as in C++. Conversions go between float64, float32, float16, bfloat16, int64, int32,
int16, int8, uint8 and bool.

Tensors with dimensions are never stored: an element is computed where it is used. The lengths of rows that are reduced are
compiled in, all other sizes are arguments. An index may be negative, and is checked; so is one into a slice.
"""
TAIL = """
## Refused

- What reads data while tracing: `.item()`, `.tolist()`, `.numpy()`, `bool(tensor)`, `if tensor:`, `nonzero`, `masked_select`,
  indexing by a bool or uint8 tensor. Write `torch.where(condition, a, b)`.
- Random numbers. Draw them before the call and capture the tensor.
- Writing to captured tensors.
- Scans and sorts (`cumsum`, `sort`, `topk`), `einsum` over more than a product of matrices, convolutions,
  complex numbers, `lgamma`, `digamma`, `erfinv`, `erfc`, Bessel functions: compute a table before the call and capture it.
- Reductions over a dimension whose length is only known at run time, and a negative step or a late bound of a slice there.
- Constant tensors of more than 64 elements made inside of a mod: make them outside and capture them.
"""


def text() -> str:
    """The page."""
    sections: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in OPERATIONS.items():
        sections.setdefault(entry.section, []).append((name, entry))
    parts = [HEAD]
    for section in sorted(sections):
        entries = sections[section]
        kinds = sorted({KINDS[entry.kind] for _, entry in entries})
        parts.append(f"\n## {section}\n\n{' and '.join(kinds)}.\n\n")
        rows: dict[str, dict[str, list[str]]] = {}
        for name, entry in entries:
            base, _, overload = name.partition(".")
            rows.setdefault(entry.note, {}).setdefault(base, []).append(overload)
        for note, names in rows.items():
            listed = ", ".join(_spelling(base, overloads) for base, overloads in names.items())
            parts.append(f"- {listed}{f': {note}' if note else ''}\n")
    parts.append(TAIL)
    return "".join(parts)


def _spelling(base: str, overloads: list[str]) -> str:
    """`add` (.Tensor, .Scalar)"""
    named = ", ".join(f".{overload}" for overload in overloads if overload)
    return f"`{base}`{f' ({named})' if named else ''}"


if __name__ == "__main__":
    PATH.write_text(text())
