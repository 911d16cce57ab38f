"""Documents into rows of one context: tokenised, packed, and drawn in an order that one number resumes.

A file is text (one document), or JSON lines with a `text`, or a `prompt` and a `completion`, of which only the
completion is trained on; a folder is all of its files. The tokenizer is the model folder's own `tokenizer.json`.

Each row holds several documents, or a piece of one that is longer than a row. `segments` numbers them from 1 (0 is
padding) and `positions` counts from 0 in each, so that a document trains as it would alone. `weights` are 1 where the
prediction counts. `Rows` has a length and is indexed, which is also what a data loader such as Grain reads from.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from jax.sharding import Mesh

import zero2jax

FIELDS = {
    "tokens": np.int32,
    "targets": np.int32,
    "weights": np.float32,
    "segments": np.int32,
    "positions": np.int32,
}


class DataError(ValueError):
    """A data file, or a tokenizer, cannot be used."""


@dataclasses.dataclass(frozen=True)
class Document:
    """Text; its loss counts from the end of `prompt` on, or all of it if there is none."""

    text: str
    prompt: str | None = None


def read_documents(path: Path) -> Iterator[Document]:
    """The documents of a file, or of a folder's files in the order of their names.

    Raises:
      DataError: no such file; a line of a `.jsonl` file is no object with the fields above (named by its number).
    """
    if not path.exists():
        raise DataError(f"reading {path}: no such file or folder. Give it with --data.")
    for file in sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]:
        if file.suffix == ".jsonl":
            for i, line in enumerate(file.read_bytes().split(b"\n"), 1):
                if line.strip():
                    yield _from_json(f"{file}, line {i}", line)
        elif text := file.read_text(errors="replace"):
            yield Document(text)


def _from_json(where: str, line: bytes) -> Document:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"reading {where}: it is no JSON ({error}).") from error
    given = (
        {name: fields.get(name) for name in ("text", "prompt", "completion")}
        if isinstance(fields, dict)
        else {}
    )
    names = {name for name, value in given.items() if isinstance(value, str)}
    if names == {"text"}:
        return Document(given["text"])
    if names == {"prompt", "completion"}:
        return Document(given["completion"], given["prompt"])
    raise DataError(
        f"reading {where}: it must be an object with a string `text`, or with strings `prompt` and `completion`; "
        f"strings in it are {sorted(names)}."
    )


def load_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a model folder, which neither cuts nor pads.

    Raises:
      DataError: there is no `tokenizer.json`, or it holds no tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise DataError(
            f"reading {path}: no such file. The folder of a model with a fast tokenizer holds one."
        )
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"reading {path}: it is no JSON ({error}).") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("model"), dict):
        raise DataError(
            f"reading {path}: it holds no tokenizer, which has a `model`. Save it with the tokenizer's save()."
        )
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_token(folder: Path) -> int | None:
    """The token that ends a document, `eos_token_id` of `config.json`, the first of several; None if there is none."""
    ids = json.loads((folder / "config.json").read_text()).get("eos_token_id")
    return ids[0] if isinstance(ids, list) else ids


def tokenise(
    tokenizer: tokenizers.Tokenizer, documents: Iterable[Document], end: int | None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Per document (tokens (n,), whether each is to be predicted (n,)); `end` closes a text or a completion.

    What the tokenizer itself puts before a text (a token that begins it) it puts before a prompt, too.
    """
    for document in documents:
        last = [] if end is None else [end]
        if document.prompt is None:
            ids = [*tokenizer.encode(document.text).ids, *last]
            first = 0
        else:
            prompt = tokenizer.encode(document.prompt).ids
            first = len(prompt)
            ids = [*prompt, *tokenizer.encode(document.text, add_special_tokens=False).ids, *last]
        yield np.array(ids, np.int32), np.arange(len(ids)) >= first


class Rows:
    """Packed rows: `rows[i]` is a dict of arrays (T,), by the names in `FIELDS`."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["tokens"])

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {name: x[index] for name, x in self.arrays.items()}

    def split(self, one_in: int) -> tuple[Rows, Rows]:
        """(the other rows, every `one_in`-th row, from the first on)."""
        held_out = np.arange(len(self)) % one_in == 0
        return Rows(self[~held_out]), Rows(self[held_out])


def pack(documents: Iterable[tuple[np.ndarray, np.ndarray]], context: int) -> Rows:
    """Put tokenised documents into rows of `context` predictions, each into the fullest row that has room for it.

    A document of n tokens makes n - 1 predictions; one of more than `context` is cut into pieces, each a segment of its
    own. Rows are in the order of their first document.

    Raises:
      DataError: there is no prediction that counts.
    """
    pieces = []
    for tokens, counts in documents:
        for start in range(0, len(tokens) - 1, context):
            end = min(start + context, len(tokens) - 1)
            if counts[start + 1 : end + 1].any():
                pieces.append((tokens[start : end + 1], counts[start + 1 : end + 1]))
    if not pieces:
        raise DataError("packing documents: none of them has a token to predict. Give longer ones.")

    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for i, (_, counts) in enumerate(pieces):
        at = bisect.bisect_left(room, (len(counts), 0))
        left, row = room.pop(at) if at < len(room) else (context, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        if left > len(counts):
            bisect.insort(room, (left - len(counts), row))

    arrays = {name: np.zeros((len(rows), context), dtype) for name, dtype in FIELDS.items()}
    for r, members in enumerate(rows):
        start = 0
        for segment, i in enumerate(members, 1):
            tokens, counts = pieces[i]
            part = slice(start, start := start + len(counts))
            values = (tokens[:-1], tokens[1:], counts, segment, np.arange(len(counts)))
            for name, value in zip(FIELDS, values):
                arrays[name][r, part] = value
    return Rows(arrays)


def load_rows(folder: Path, path: Path, context: int) -> Rows:
    """The documents at `path` in rows, by the tokenizer of a model folder. Raises as what it calls does."""
    return pack(tokenise(load_tokenizer(folder), read_documents(path), end_token(folder)), context)


class Batches:
    """An endless iterator over batches of rows, this process's part of each; `state` is where it stands.

    The order is that of `zero2jax.BatchOrder`: another one in each epoch, from the seed. `state` can be set to what it
    was, also in a run with another batch size, or to a number of batches.
    """

    def __init__(self, rows: Rows, batch_size: int, mesh: Mesh, seed: int = 0):
        self._rows = rows
        self._order = zero2jax.BatchOrder(len(rows), batch_size, mesh, seed=seed)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return self._rows[next(self._order)]

    @property
    def state(self) -> Any:
        return self._order.state

    @state.setter
    def state(self, state: Any) -> None:
        self._order.state = state
