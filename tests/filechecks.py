"""FileCheck in process: `filecheck(module, "// CHECK: …")`."""

from __future__ import annotations

import contextlib
import io

from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts


def filecheck(text: object, checks: str) -> None:
    """Asserts that `str(text)` matches the directives in `checks`."""
    options = Options(match_filename="checks")
    printed = str(text)
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(errors):
        matcher = Matcher(options, FInput("module", printed), Parser(options, io.StringIO(checks), *pattern_for_opts(options)))
        code = matcher.run()
    assert code == 0, f"{errors.getvalue()}\n{printed}"
