"""What `opt`, `compile` and `run` have in common: reading a program, and saying in one message what is wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from attnc.errors import AttncError


def read_text(file: str) -> tuple[str, str]:
    """(MLIR text, what to call it) of a file, of an exported program's (.pt2), or of stdin for "-"."""
    name = "<stdin>" if file == "-" else file
    if file.endswith(".pt2"):
        with reporting(name):
            from attnc.compile_program import text_of_exported_file

            return text_of_exported_file(file), name
    try:
        return (sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")), name
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{name}: {error}") from None


@contextmanager
def reporting(name: str) -> Iterator[None]:
    """Ends the process with one message and code 1 for whatever goes wrong with the program called `name`."""
    try:
        yield
    except AttncError as error:
        text = str(error)
        click.echo(text if text.startswith(f"{name}:") else f"{name}: error: {text}", err=True)
        sys.exit(1)
    except (click.ClickException, click.exceptions.Exit, KeyboardInterrupt):
        raise
    except RecursionError:
        click.echo(f"{name}: error: nested too deeply", err=True)
        sys.exit(1)
    except MemoryError as error:
        click.echo(f"{name}: error: not enough memory: {error}", err=True)
        sys.exit(1)
    except Exception as error:  # whatever a pass meets in a strange module, the user gets one line
        first = (str(error).strip().splitlines() or [""])[0]
        click.echo(f"{name}: error: {type(error).__name__}: {first}", err=True)
        sys.exit(1)
