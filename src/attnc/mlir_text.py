"""MLIR text in, with the place of every fault: what does not parse, and what parses but does not verify."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attnc.errors import IRSyntaxError

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp
    from xdsl.ir import Operation, SSAValue

_FILE_NAME = re.compile(r"[^\s\"%@{]+\.(mlir|pt2)")
_READ_FILE = {"lir": "pass what it holds: Path(name).read_text()", "pt2": "pass torch.export.load(name)"}
_STRING_OR_COMMENT = re.compile(r'//[^\n]*|"(?:[^"\\\n\v\f]|\\(?:["nt\\]|[0-9A-Fa-f]{2}))*+(?P<end>"?)')


def parse_module(text: str, filename: str = "<text>") -> ModuleOp:
    """Read and verify a module of any stage. Raises `IRSyntaxError` that names line and column, whatever is wrong with it."""
    from xdsl.parser import Parser
    from xdsl.utils.exceptions import ParseError

    from attnc.dialects.context import build_context, parsed_resources
    from attnc.dialects.resources import add_encoded

    class PlacingParser(Parser):
        """Remembers where each operation begins; reads the results of a linalg.generic, where it has several, as they are
        printed."""

        def parse_comma_separated_list(self, delimiter, parse, context_msg=""):
            several = delimiter is Parser.Delimiter.NONE and parse == self.parse_attribute and self._peek() == "("
            if several:
                return super().parse_comma_separated_list(Parser.Delimiter.PAREN, self.parse_type, context_msg)
            return super().parse_comma_separated_list(delimiter, parse, context_msg)

        def _peek(self) -> str:
            return text[self.pos : self.pos + 1]

        def parse_operation(self) -> Operation:
            start = self.pos
            operation = super().parse_operation()
            places[operation] = start
            return operation

    if not text.strip():
        raise _error("the text is empty", text, filename, 0)
    if _FILE_NAME.fullmatch(text):
        raise IRSyntaxError(
            "this is a file's name, not the text of a module", filename=filename, source=text, remedy=_READ_FILE[text[-3:]]
        )
    for literal in _STRING_OR_COMMENT.finditer(text):
        if literal["end"] == "":  # xDSL's own pattern takes exponential time to find that out
            raise _error("this string does not end, or has an unknown escape", text, filename, literal.start())
    places: dict[Operation, int] = {}
    parser = None
    try:
        context = build_context()
        parser = PlacingParser(context, text, filename)
        module = parser.parse_module()
        add_encoded(module, parsed_resources(context))
    except ParseError as error:
        raise _parse_error(error.msg, text, filename, error.span.start) from None
    except RecursionError:
        raise _error("nested too deeply", text, filename, 0) from None
    except Exception as error:  # an operation's own parser met something it did not expect
        place = parser.pos if parser is not None else 0
        raise _error(_first_line(error), text, filename, min(place, len(text))) from error
    verify_module(module, text, filename, places)
    return module


def print_module(module: ModuleOp) -> str:
    """The text of a module, its resources in the section `{-# dialect_resources … #-}` where MLIR's own tools look for them."""
    from attnc.dialects.resources import ATTRIBUTE, encoded

    resources = encoded(module)
    if not resources:
        return str(module)
    held = module.attributes.pop(ATTRIBUTE)
    try:
        text = str(module)
    finally:
        module.attributes[ATTRIBUTE] = held
    entries = ",\n".join(f'      {key}: "{value}"' for key, value in sorted(resources.items()))
    return f"{text}\n\n{{-#\n  dialect_resources: {{\n    builtin: {{\n{entries}\n    }}\n  }}\n#-}}"


def verify_module(module: ModuleOp, text: str, filename: str, places: dict[Operation, int]) -> None:
    """Verify, innermost operations first. Raises `IRSyntaxError` at the operation that does not."""

    visible: set[SSAValue] = set()

    def visit(operation: Operation) -> None:
        for operand in operation.operands:
            if operand not in visible:  # xDSL's parser takes a later value for a forward reference
                name = f"%{operand.name_hint}" if operand.name_hint else "an operand"
                message = f"'{operation.name}' uses {name} where it is not defined yet"
                raise _error(message, text, filename, places.get(operation, 0))
        for region in operation.regions:
            inside: list[SSAValue] = []
            for block in region.blocks:
                inside += block.args
                visible.update(block.args)
                for inner in block.ops:
                    visit(inner)
                    inside += inner.results
                    visible.update(inner.results)
            visible.difference_update(inside)
        try:
            operation.verify(verify_nested_ops=False)
        except Exception as error:  # verifiers may meet what they did not expect, too
            place = places.get(operation, 0)
            raise _error(f"'{operation.name}' does not verify: {_cause(error)}", text, filename, place) from error
        if (problem := problem_of(operation)) is not None:
            place = places.get(operation, 0)
            raise _error(f"'{operation.name}' does not verify: {problem}", text, filename, place)

    from attnc.dialects.linalg_checks import problem_of

    visit(module)
    try:
        module.verify()
    except Exception as error:
        raise _error(f"the module does not verify: {_cause(error)}", text, filename, 0) from error


def _parse_error(message: str, text: str, filename: str, position: int) -> IRSyntaxError:
    """xDSL's words, at the place they are about."""
    if undefined := re.fullmatch(r"values used but not defined: \[(%[^,\]]+).*\]", message.strip()):
        if found := re.search(re.escape(undefined[1]) + r"\b", text):
            position = found.start()
    elif unknown := re.match(r"Operation (\S+) is not registered", message):
        position = max(text.rfind(unknown[1], 0, position), 0)
        return _error(message, text, filename, position, remedy=None)
    elif position >= len(text.rstrip()):
        message = f"the text ends too early ({message.strip().rstrip('.')})"
    return _error(message, text, filename, position)


def _error(message: str, text: str, filename: str, position: int, remedy: str | None = "") -> IRSyntaxError:
    begin = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    return IRSyntaxError(
        message.strip().rstrip("."),
        filename=filename,
        line=text.count("\n", 0, position) + 1,
        column=position - begin + 1,
        source=text[begin : len(text) if end < 0 else end],
        remedy=remedy,
    )


def _cause(error: BaseException) -> str:
    """The verifier's own words: xDSL wraps them in a print of the whole module."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0] if not isinstance(error, KeyError) else f"unknown {lines[0]}"
