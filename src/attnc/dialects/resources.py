"""The bytes behind `dense_resource<key>`: weights that MLIR text keeps in its last section, `{-# dialect_resources … #-}`.

A module carries them in the attribute `attnc.resources = {key = "0x04000000…"}` (MLIR's own encoding: four bytes of alignment,
then the elements), so that they survive a plain print. `attnc.mlir_text` moves them between that attribute and the section.
"""

from __future__ import annotations

from collections.abc import Mapping

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, StringAttr

ATTRIBUTE = "attnc.resources"
_HEADER = 4  # bytes: the blob's alignment


def resources_of(module: ModuleOp) -> dict[str, bytes]:
    """The elements' bytes of every resource of `module`, by key, little-endian, in the order of the elements."""
    return {key: bytes.fromhex(text[2:])[_HEADER:] for key, text in encoded(module).items()}


def add_resources(module: ModuleOp, resources: Mapping[str, bytes], alignment: int = 64) -> None:
    """Puts further resources into `module`."""
    header = alignment.to_bytes(_HEADER, "little").hex()
    add_encoded(module, {key: f"0x{header}{data.hex()}" for key, data in resources.items()})


def encoded(module: ModuleOp) -> dict[str, str]:
    """The resources as MLIR text writes them: "0x…"."""
    known = module.attributes.get(ATTRIBUTE)
    if not isinstance(known, DictionaryAttr):
        return {}
    return {key: value.data for key, value in known.data.items() if isinstance(value, StringAttr)}


def add_encoded(module: ModuleOp, resources: Mapping[str, str]) -> None:
    """Puts further resources, already as text, into `module`."""
    if both := {**encoded(module), **resources}:
        module.attributes[ATTRIBUTE] = DictionaryAttr({key: StringAttr(value) for key, value in both.items()})
