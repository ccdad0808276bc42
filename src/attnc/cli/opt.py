"""`attnc opt`: run passes on MLIR text, in the manner of mlir-opt."""

from __future__ import annotations

import sys

import click

from attnc.cli.reading import read_text, reporting


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), default="-")
@click.option("--passes", "-p", default="", help="Passes to run in this order, separated by commas. None: read, verify, print.")
@click.option("--print-ir-after-all", is_flag=True, help="Print the module after each pass to stderr.")
@click.option("--emit-iree", is_flag=True, help="Print what iree-compile takes: attention that IREE gets wrong is written out.")
@click.option("--list", "list_passes", is_flag=True, help="Print the names of all passes and end.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, allow_dash=True), default="-", help="Where the result goes.")
def opt(file: str, passes: str, print_ir_after_all: bool, emit_iree: bool, list_passes: bool, output: str) -> None:
    """Run passes on the program in FILE (.mlir; .pt2 as torch.export.save writes it; - is stdin) and print the result.

    A module that does not parse or verify gets file:line:col, its line and a caret, and exit code 1.
    """
    from attnc import pipeline
    from attnc.errors import AttncError, PassOrderError, UnknownPassError

    if list_passes:
        click.echo("\n".join(pipeline.all_passes()))
        return
    names = [name for part in passes.split(",") if (name := part.strip())]
    for name in names:
        if name not in pipeline.all_passes():
            raise UnknownPassError.named(name, pipeline.all_passes())

    from attnc.mlir_text import parse_module, print_module
    from attnc.target import Target

    text, filename = read_text(file)
    with reporting(filename):
        module = parse_module(text, filename)
    target = Target.host()
    for name in names:
        try:
            pipeline.run_pass(module, name, target)
        except PassOrderError as error:
            click.echo(f"{filename}: error: {error}", err=True)
            sys.exit(1)
        except AttncError as error:
            click.echo(f"{filename}: error: pass {name}: {error}", err=True)
            sys.exit(1)
        except Exception as error:  # whatever a pass meets in a strange module, the user gets one line
            first = (str(error).strip().splitlines() or [""])[0]
            click.echo(f"{filename}: error: pass {name}: {type(error).__name__}: {first}", err=True)
            sys.exit(1)
        if print_ir_after_all:
            click.echo(f"// -----// IR after {name} //----- //\n{module!s}\n", err=True)
    if emit_iree:
        from attnc.graph_pipeline import for_iree

        with reporting(filename):
            for_iree(module)
    with click.open_file(output, "w", encoding="utf-8") as stream:
        stream.write(print_module(module) + "\n")
