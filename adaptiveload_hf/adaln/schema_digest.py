"""Which arguments do the ops have? One short word for all their schemas, which a build of the extension carries.

setup.py runs this file by itself: it imports nothing that a build may lack.
"""

import ast
import hashlib
import re
from pathlib import Path

MARK = "adaptiveload ops "  # what the word follows in the extension's file


def schema_digest(module: Path) -> str:
    """A word that changes with any op schema, `name(...) -> ...`, in the source of a module."""
    strings = (node.value for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.Constant))
    schemas = sorted(s for s in strings if isinstance(s, str) and re.match(r"\w+\(.*\) *->", s, re.DOTALL))
    return "s" + hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16]
