"""A hook of mkdocs: the build fails on a public name that has no entry in `api.md`."""

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

PACKAGE = Path(__file__).parents[1] / "zero2jax" / "__init__.py"


def public_names() -> set[str]:
    """`zero2jax.__all__`, read without importing jax."""
    assigned = (node for node in ast.parse(PACKAGE.read_text()).body if isinstance(node, ast.Assign))
    return next(set(ast.literal_eval(node.value)) for node in assigned if node.targets[0].id == "__all__")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> None:
    """Compare `api.md` with the names."""
    if page.file.src_uri == "api.md":
        documented = set(re.findall(r"^::: zero2jax\.(\w+)$", markdown, re.MULTILINE))
        if documented != public_names():
            raise PluginError(
                f"docs/api.md and zero2jax.__all__ differ in {sorted(documented ^ public_names())}"
            )
