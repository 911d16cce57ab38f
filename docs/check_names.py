"""A hook of mkdocs: the build fails on a public name without an entry in `api.md`, or a home page without program."""

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


def on_page_content(html: str, *, page: Any, **_: Any) -> None:
    """Look for the program on the home page: a snippet that is not expanded is shown as it stands."""
    if page.file.src_uri == "index.md" and "zero2jax.Engine(" not in re.sub("<[^>]+>", "", html):
        raise PluginError("docs/index.md does not show examples/minimal.py: see its line with --8<--")
