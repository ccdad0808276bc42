"""`attnc run`: run a function of an MLIR module on arrays, in the manner of iree-run-module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from attnc.cli.reading import read_text, reporting
from attnc.errors import ArgumentsError

_SHAPED = re.compile(r"(?:(?P<shape>\d+(?:x\d+)*)x)?(?P<dtype>[a-z]+\d+)(?:=(?P<values>.*))?", re.DOTALL)
LARGEST = 1 << 31
_NUMPY = {"f64": "float64", "f32": "float32", "f16": "float16", "i1": "bool", "index": "int64"}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), default="-")
@click.option("--function", "-f", help="The function to run; needed only where there are several public ones.")
@click.option(
    "--input", "-i", "inputs", multiple=True, help="One for each argument: @file.npy, 2x3xf32=1.5, 4xf32=1,2,3,4, f32=0.5, 0.5."
)
@click.option("--output", "-o", "outputs", multiple=True, help="One for each result: @file.npy, or - to print it (as without).")
def run(file: str, function: str | None, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
    """Compile the program in FILE (.mlir; .pt2 as torch.export.save writes it; - is stdin) and run it.

    Inputs are read from .npy files or written out as SHAPExDTYPE=VALUES: one value for all elements, or all of them,
    separated by commas or spaces. Without values they are zeros.
    """
    text, name = read_text(file)
    with reporting(name):
        from attnc.compile_program import from_mlir

        program = from_mlir(text, name, function)
        if len(inputs) != len(program.arguments):
            wanted = ", ".join(argument.describe() for argument in program.arguments)
            raise ArgumentsError(
                f"{counted(len(inputs), 'input')} given, {len(program.arguments)} needed",
                remedy=f"one --input for each of ({wanted})",
            )
        values = [read_value(word, argument.dtype) for word, argument in zip(inputs, program.arguments, strict=True)]
        results = program(*values)
        listed = results if isinstance(results, tuple) else (results,)
        if outputs and len(outputs) != len(listed):
            raise ArgumentsError(
                f"{counted(len(outputs), 'output')} given for {counted(len(listed), 'result')}", remedy="one --output for each"
            )
        for n, result in enumerate(listed):
            write_value(n, result, outputs[n] if outputs else "-")


def counted(count: int, what: str) -> str:
    """`1 input`, `2 inputs`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def read_value(word: str, wanted: str) -> Any:
    """An input: an array, or a Python number. Raises `ArgumentsError`."""
    import numpy

    if word.startswith("@"):
        try:
            array = numpy.load(word[1:], allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ArgumentsError(f"--input {word}: {error}", remedy="an .npy file holds one array") from None
        if not isinstance(array, numpy.ndarray):
            raise ArgumentsError(f"--input {word}: it holds several arrays", remedy="an .npy file holds one array")
        return (
            array.view(_dtype("bf16"))
            if wanted == "bf16" and array.dtype.itemsize == 2 and array.dtype.kind in "Vui"
            else array
        )
    try:
        return int(word)
    except ValueError:
        pass
    try:
        return float(word)
    except ValueError:
        pass
    found = _SHAPED.fullmatch(word)
    if found is None:
        raise ArgumentsError(f"--input {word!r} is not understood", remedy="@file.npy, 2x3xf32=1.5, or a number")
    dtype = _dtype(found["dtype"])
    shape = tuple(int(size) for size in found["shape"].split("x")) if found["shape"] else ()
    count = 1
    for size in shape:
        count *= size
    if count > LARGEST:
        raise ArgumentsError(f"--input {word!r}: that is more than {LARGEST} elements")
    written = [part for part in re.split(r"[\s,\[\]]+", found["values"] or "0") if part]
    try:
        numbers = [_number(part, found["dtype"]) for part in written]
        if len(numbers) not in (1, count):
            raise ArgumentsError(
                f"--input {word!r}: {counted(len(numbers), 'value')} for {counted(count, 'element')}",
                remedy="one value for all elements, or one for each",
            )
        _check_range(word, numbers, dtype)
        array = numpy.full(shape, numbers[0], dtype) if len(numbers) == 1 else numpy.array(numbers).astype(dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        raise ArgumentsError(f"--input {word!r}: {error}", remedy="values are numbers, separated by commas or spaces") from None
    return array if shape or wanted else array.item()


def _check_range(word: str, numbers: list[float | int], dtype: Any) -> None:
    import numpy

    if dtype.kind in "iub":
        low, high = (0, 1) if dtype.kind == "b" else (int(numpy.iinfo(dtype).min), int(numpy.iinfo(dtype).max))
        for number in numbers:
            if not low <= number <= high:
                raise ArgumentsError(
                    f"--input {word!r}: {number} is outside of [{low}, {high}]", remedy="choose a wider element type"
                )


def _number(text: str, dtype: str) -> float | int:
    if text in ("true", "false"):
        return int(text == "true")
    return float(text) if dtype.startswith(("f", "bf")) else int(text)


def _dtype(name: str) -> Any:
    import numpy

    if name == "bf16":
        from attnc.runtime.graph import numpy_dtype

        return numpy_dtype("bf16")
    name = _NUMPY.get(name, re.sub(r"^(si|i)(\d)", r"int\2", re.sub(r"^(ui|u)(\d)", r"uint\2", name)))
    try:
        return numpy.dtype(name)
    except TypeError:
        raise ArgumentsError(
            f"there is no element type {name!r}", remedy="f64, f32, f16, bf16, i64, i32, i16, i8, i1"
        ) from None


def write_value(n: int, value: Any, where: str) -> None:
    """Writes a result to an .npy file, or prints it as iree-run-module does."""
    import numpy

    if where != "-":
        path = Path(where.removeprefix("@"))
        array = numpy.asarray(value)
        try:
            numpy.save(path, array.view(numpy.uint16) if array.dtype.name == "bfloat16" else array)
        except OSError as error:
            raise ArgumentsError(
                f"--output {where}: {error.strerror or error}", remedy="name a file that can be written"
            ) from None
        return
    if not hasattr(value, "shape"):
        click.echo(f"result[{n}]: {value}")
        return
    array = numpy.asarray(value)
    short = {"float": "f", "bfloat": "bf", "int": "i", "uint": "ui", "bool": "i1"}
    kind = re.sub(r"^(bfloat|float|uint|int|bool)", lambda found: short[found[1]], array.dtype.name)
    sizes = "x".join([*map(str, array.shape), kind])
    click.echo(f"result[{n}]: hal.buffer_view\n{sizes}={_written(array)}")


def _written(array: Any) -> str:
    if array.ndim == 0:
        number = float(array) if array.dtype.kind not in "iub" else int(array)
        return f"{number:g}" if isinstance(number, float) else str(number)
    if array.ndim == 1:
        return " ".join(_written(element) for element in array)
    return "".join(f"[{_written(row)}]" for row in array)
