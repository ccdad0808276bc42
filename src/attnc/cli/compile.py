"""`attnc compile`: a whole program, to be read at the level one likes."""

from __future__ import annotations

import click

from attnc.cli.reading import read_text, reporting
from attnc.errors import ArgumentsError

LEVELS = ("mlir", "llvm", "asm")


@click.command("compile")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, allow_dash=True), default="-")
@click.option("--emit", type=click.Choice(LEVELS), default="mlir", show_default=True, help="What is printed.")
@click.option("--function", "-f", help="The function to compile; needed only where there are several public ones.")
@click.option("--output", "-o", type=click.Path(dir_okay=False, allow_dash=True), default="-", help="Where the result goes.")
def compile_command(file: str, emit: str, function: str | None, output: str) -> None:
    """Compile the program in FILE (.mlir; .pt2 as torch.export.save writes it; - is stdin) and print it.

    mlir: the module after all passes of a whole program: kernels' functions and the host function that calls them.
    llvm, asm: the code of every kernel, for inputs in row-major order.
    """
    text, name = read_text(file)
    with reporting(name):
        result = _emitted(text, name, emit, function)
        try:
            with click.open_file(output, "w", encoding="utf-8") as stream:
                stream.write(result.rstrip("\n") + "\n")
        except FileNotFoundError as error:
            raise ArgumentsError(f"--output {output}: {error.strerror}", remedy="name a file that can be written") from None


def _emitted(text: str, name: str, emit: str, function: str | None) -> str:
    from attnc import graph_pipeline
    from attnc.compile_program import from_mlir
    from attnc.target import Target

    if emit == "mlir":
        from attnc.codegen.host import public_function
        from attnc.mlir_text import parse_module

        module = graph_pipeline.lower_graph(parse_module(text, name), Target.host())
        public_function(module, function)
        return str(module)
    program = from_mlir(text, name, function)
    program.prepare()
    comment = "; " if emit == "llvm" else "# "
    parts = []
    for kernel, variant in program.variants:
        parts.append(
            f"{comment}{kernel['what']}: {variant}\n\n{graph_pipeline.graph_kernel_code(kernel, variant, emit == 'asm')}"
        )
    return "\n".join(parts)
