"""Documents into rows: what counts, what sees what, and where a run goes on."""

import json

import jax
import llama_oracle as oracle
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

import zero2jax
from examples.llama import data, model
from examples.llama.config import read_config
from examples.llama.losses import make_loss

WORDS = ["<end>", "<begin>", *"abcdefghij"]


@pytest.fixture
def folder(tmp_path):
    """A model folder with a tokenizer of one token per word, which begins every text with a token."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 1)]
    )
    tokenizer.enable_truncation(3)  # as some folders say
    out = tmp_path / "folder"
    out.mkdir()
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    return out


def test_files_become_rows_in_which_completions_alone_count(tmp_path, folder):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "1.txt").write_text("a b c d e f g")
    lines = [
        {"text": "h i"},
        {"prompt": "a b", "completion": "c d", "id": 3},
        {"prompt": "j", "completion": "a"},
    ]
    (texts / "2.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    rows = data.load_rows(folder, texts, 6)
    # 8 predictions of the first text in pieces of 6 and 2; 3, 5 and 3 of the others
    expected = {
        "tokens": [[1, 2, 3, 4, 5, 6], [7, 8, 1, 9, 10, 0], [1, 2, 3, 4, 5, 0], [1, 11, 2, 0, 0, 0]],
        "targets": [[2, 3, 4, 5, 6, 7], [8, 0, 9, 10, 0, 0], [2, 3, 4, 5, 0, 0], [11, 2, 0, 0, 0, 0]],
        "weights": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0], [0, 1, 1, 0, 0, 0]],
        "segments": [[1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0]],
        "positions": [[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 0], [0, 1, 2, 0, 0, 0]],
    }
    assert {name: x.tolist() for name, x in rows.arrays.items()} == expected
    assert {name: x.dtype for name, x in rows[0].items()} == data.FIELDS
    training, held_out = rows.split(2)
    assert held_out[:]["tokens"].tolist() == [expected["tokens"][i] for i in (0, 2)]
    assert len(training) == 2


def test_a_document_goes_into_the_fullest_row_that_has_room():
    document = lambda n: (np.arange(n + 1, dtype=np.int32), np.ones(n + 1, bool))
    rows = data.pack([document(n) for n in (5, 7, 3, 2, 1, 8)], 8)
    assert [np.unique(s, return_counts=True)[1].tolist() for s in rows.arrays["segments"]] == [
        [5, 3],
        [7, 1],
        [6, 2],
        [8],
    ]


def test_packed_documents_train_as_they_would_alone():
    config = read_config(oracle.CONFIGS["llama 3: grouped, rope llama3, packed"])
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(scale=0.4, size=x.shape).astype(np.float32), model.param_shapes(config)
    )
    documents = [
        (rng.integers(0, config.vocab, n).astype(np.int32), np.arange(n) >= prompt)
        for n, prompt in ((5, 0), (4, 2), (6, 3))
    ]
    packed = data.pack(documents, 12)[:]
    assert packed["tokens"].shape == (1, 12)
    padded = {name: np.concatenate([x, np.zeros((2, 12), x.dtype)]) for name, x in packed.items()}
    alone = [data.pack([document], 12)[:] for document in documents]
    alone = {name: np.concatenate([x[name] for x in alone]) for name in packed}
    assert alone["weights"].sum(1).tolist() == [4, 2, 3]
    grad = jax.jit(jax.value_and_grad(make_loss(config), has_aux=True))
    found, expected = grad(params, padded), grad(params, alone)
    assert found[0][1]["num_tokens"] == 9
    # fp32 sums over 12 tokens, grouped otherwise
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_batches_go_on_from_one_number():
    rows = data.Rows({"tokens": np.arange(20)[:, None]})
    batches, again = (data.Batches(rows, 6, zero2jax.make_mesh(data=2), seed=1) for _ in range(2))
    drawn = [next(batches)["tokens"].ravel().tolist() for _ in range(5)]
    assert len({x for batch in drawn[:3] for x in batch}) == 18
    again.state = 4
    assert next(again)["tokens"].ravel().tolist() == drawn[4]
    again.state = json.loads(json.dumps(batches.state))
    np.testing.assert_array_equal(next(again)["tokens"], next(batches)["tokens"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"text": "a"}\n{"prompt": "a"}',
            r"x\.jsonl, line 2: it must be an object .* strings in it are \['prompt'\]",
        ),
        ('{"text": 3}', r"line 1: it must be an object .* strings in it are \[\]"),
        ("[1]", r"line 1: it must be an object"),
        ("{", r"line 1: it is no JSON"),
        ('{"text": "\xff"}', r"line 1: it is no JSON"),  # latin 1
        ("", r"none of them has a token to predict"),
    ],
)
def test_data_that_cannot_be_read_is_named(tmp_path, folder, content, message):
    (tmp_path / "x.jsonl").write_bytes(content.encode("latin1"))
    with pytest.raises(data.DataError, match=message):
        data.load_rows(folder, tmp_path / "x.jsonl", 6)


def test_files_that_are_not_there_are_named(tmp_path, folder):
    with pytest.raises(data.DataError, match=r"nothing: no such file or folder\. Give it with --data"):
        data.load_rows(folder, tmp_path / "nothing", 6)
    for content, message in (("{", "it is no JSON"), ("{}", "it holds no tokenizer, which has a `model`")):
        (folder / "tokenizer.json").write_text(content)
        with pytest.raises(data.DataError, match=rf"reading .*tokenizer\.json: {message}"):
            data.load_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(data.DataError, match=r"tokenizer\.json: no such file"):
        data.load_tokenizer(folder)
