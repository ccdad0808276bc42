"""Runs `attnc opt`, `attnc compile` and `attnc run` on the texts of a directory, in one process, and says what became of each.

    python tests/fuzz_text.py DIRECTORY

Prints a line for each file: its name, then the exit codes of the three. Ends with code 1 where any of them ended otherwise than
with 0, or with 1 and a message.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from attnc.cli import commands
from attnc.errors import AttncError

PASSES = (
    "generalize-linalg,raise-attention,fold-into-attention,outline-attention,fuse-elementwise,outline-loops",
    "attention-to-linalg",
)


def complaint(words: list[str]) -> tuple[int, str]:
    """(exit code, what is wrong with how the command ended)."""
    result = CliRunner().invoke(commands, words)
    error = result.exception
    if result.exit_code == 0:
        return 0, ""
    if error is not None and not isinstance(error, SystemExit | AttncError):
        return result.exit_code, f"{type(error).__name__}: {error}"
    said = result.output.strip() or str(error).strip()
    if result.exit_code != 1 or not said or "Traceback" in said or "object at 0x" in said:
        return result.exit_code, said or "no message"
    return 1, ""


def main(directory: Path) -> int:
    inputs = [f"--input=@{file}" for file in sorted(directory.glob("*.npy"))]
    wrong = 0
    for file in sorted(directory.glob("*.mlir")):
        codes = []
        commands_ = [["opt", str(file), "-p", passes, "-o", str(directory / "o.txt")] for passes in PASSES]
        commands_ += [["compile", str(file), "-o", str(directory / "o.txt")], ["run", str(file), *inputs]]
        for words in commands_:
            code, problem = complaint(words)
            codes.append(str(code))
            if problem:
                wrong += 1
                print(f"WRONG {' '.join(words)}: {problem[:500]}")
        print(file.name, *codes, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main(Path(sys.argv[1])))
