"""Names that people type: the known ones nearest to a misspelt one, for messages that offer them."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.6) -> list[str]:
    """At most `count` of the known names that resemble `name` in any case, the nearest first.

    Args:
      name: what was written.
      known: what could have been meant.
      count: how many at most.
      cutoff: `difflib`'s ratio of common letters from which on two names resemble each other, 0 to 1.

    Example:
      >>> nearest("Zero_Optimisation", ["zero_optimization", "optimizer"])
      ['zero_optimization']
    """
    by_folded = {other.casefold(): other for other in reversed(list(known))}
    return [by_folded[x] for x in difflib.get_close_matches(name.casefold(), by_folded, count, cutoff)]


def did_you_mean(
    name: str, known: Iterable[str], *, cutoff: float = 0.6, otherwise: str | None = None
) -> str:
    """The sentence that offers the nearest known name; if none is near, `otherwise`, or a list of all.

    Example:
      >>> did_you_mean("dats", ["dots", "nothing"])
      "Did you mean 'dots'?"
      >>> did_you_mean("x", ["dots", "nothing"])
      'There is: dots, nothing.'
    """
    known = list(known)
    near = nearest(name, known, cutoff=cutoff)
    if near:
        return f"Did you mean {near[0]!r}?"
    return f"There is: {', '.join(known) or 'none at all'}." if otherwise is None else otherwise
