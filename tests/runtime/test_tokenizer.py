from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from sa3_models.errors import ArtefactMissing
from sa3_runtime.tokenizer import Tokenizer, TokenizerBroken

Golden = Callable[[str], dict[str, NDArray]]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return Tokenizer(tiny / "t5gemma-b-b-ul2" / "tokenizer.json")


def test_ids_are_the_references(data: Path, tiny: Path, golden: Golden) -> None:
    """An empty prompt, byte fallback, a cut prompt, and a post-processor that adds <bos>."""
    tokenize = Tokenizer(tiny / "t5gemma-b-b-ul2" / "tokenizer.json")
    with safe_open(data / "goldens" / tiny.name / "t5.safetensors", "np") as file:
        metadata = file.metadata()
    expected = golden("t5")
    for i, prompt in enumerate(json.loads(metadata["prompts"])):
        tokens = tokenize(prompt)
        np.testing.assert_array_equal(tokens.ids[0], expected["input_ids"][i])
        np.testing.assert_array_equal(tokens.mask[0], expected["attention_mask"][i])
    negative = tokenize(metadata["negative"])
    np.testing.assert_array_equal(negative.ids, expected["negative.input_ids"])


def test_a_prompt_of_five_thousand_words_tells_what_was_cut(tokenizer: Tokenizer) -> None:
    words = [f"w{i}" for i in range(5000)]
    tokens = tokenizer(" ".join(words))
    assert tokens.ids.shape == (1, 256)
    assert tokens.mask.sum() == 256
    assert tokens.total > 5000
    assert tokens.cut.endswith("w4999")
    kept = " ".join(words)[: -len(tokens.cut)]
    assert kept.startswith("w0 w1 w2")


def test_a_prompt_that_fits_is_not_cut(tokenizer: Tokenizer) -> None:
    tokens = tokenizer("rain")
    assert tokens.cut == ""
    assert 0 < tokens.mask.sum() == tokens.total < 256
    assert (tokens.ids[0, tokens.total :] == 0).all()


@pytest.mark.parametrize(
    "prompt", ["", " ", "Dalí — 日本の太鼓 🥁", "a\0b", "\ud83d", "<pad><eos>", "é" * 1000]
)
def test_any_text_has_tokens(tokenizer: Tokenizer, prompt: str) -> None:
    """CASES 46: a lone surrogate is what an undecodable byte of a terminal becomes."""
    tokens = tokenizer(prompt)
    assert tokens.ids.shape == tokens.mask.shape == (1, 256)
    assert tokens.ids.dtype == tokens.mask.dtype == np.int64


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtefactMissing, match=r"nowhere\.json"):
        Tokenizer(tmp_path / "nowhere.json")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"model": 3}', b"<html>", b'{"\xff": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerBroken, match="is no tokenizer"):
        Tokenizer(path)
