"""The nearest known name: what is offered, and when nothing is."""

from zero2jax.base.names import did_you_mean, nearest


def test_case_does_not_count_and_the_nearest_comes_first():
    known = ["fp16", "bf16", "bfloat16"]
    assert nearest("BF16", known) == ["bf16"]
    assert nearest("float16", known, count=3, cutoff=0.3) == ["bfloat16", "fp16", "bf16"]
    assert nearest("seed", known) == []


def test_the_sentence_offers_one_name_or_says_what_there_is():
    assert did_you_mean("Dot", ["dots", "full"]) == "Did you mean 'dots'?"
    assert did_you_mean("x", ["dots", "full"]) == "There is: dots, full."
    assert did_you_mean("x", []) == "There is: none at all."
    assert did_you_mean("x", ["dots"], otherwise="Remove it.") == "Remove it."
