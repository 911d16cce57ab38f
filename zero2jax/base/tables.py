"""Rows of cells as aligned text, and bytes as people read them."""

from collections.abc import Collection, Sequence

GIB = 2**30


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """One line per row, columns two spaces apart; the columns named in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    place = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
    return ["  ".join(place(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def readable_bytes(num_bytes: float | None) -> str:
    """`9.30 GiB`, `1.20 MiB` or `620 B`; `-` for None."""
    if num_bytes is None:
        return "-"
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:,.0f} B"
