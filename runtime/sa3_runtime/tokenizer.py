"""From a prompt to token ids and a mask.

Knows: `tokenizer.json` as it is, with the special tokens its own post-processor adds; right
padding. Doesn't know: what the text encoder makes of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sa3_models.errors import ArtefactMissing, Sa3Error
from sa3_models.geometry import TEXT_LEN

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Tokenizer", "TokenizerBroken", "Tokens"]

PAD_ID = 0


class TokenizerBroken(Sa3Error):
    """`tokenizer.json` can't be read."""

    exit_code = 3


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """A prompt for the text encoder.

    ids, mask: int64 [1, 256]; mask is 1 on real tokens, which come first.
    total: tokens the prompt has; more than 256 means that the end was cut.
    cut: the text that was cut off, "" if none.
    """

    ids: NDArray[np.int64]
    mask: NDArray[np.int64]
    total: int
    cut: str


class Tokenizer:
    """The tokenizer that comes with a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read a `tokenizer.json`.

        Raises:
            ArtefactMissing: the file isn't there.
            TokenizerBroken: it is no tokenizer.
        """
        from tokenizers import Tokenizer as Backend

        if not path.is_file():
            raise ArtefactMissing(
                "the tokenizer is missing",
                found=f"no file {path}",
                hint="the checkpoint isn't complete: pull or copy it again",
            )
        try:
            # no text is made of it first: a sixth less time than from_str for 256,000 pieces
            self._backend: Any = Backend.from_buffer(path.read_bytes())
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerBroken(
                f"{path} is no tokenizer", found=str(error), hint="pull or copy it again"
            ) from error
        self._backend.no_padding()

    def __call__(self, prompt: str) -> Tokens:
        """Encode a prompt, padded on the right to 256 tokens, cut there if longer."""
        # a lone surrogate (an undecodable byte of a terminal) has no UTF-8 form
        prompt = prompt.encode("utf-8", "replace").decode("utf-8")
        self._backend.no_truncation()
        encoding = self._backend.encode(prompt)
        total, cut = len(encoding.ids), ""
        if total > TEXT_LEN:
            self._backend.enable_truncation(TEXT_LEN)
            encoding = self._backend.encode(prompt)
            cut = prompt[max(end for _, end in encoding.offsets) :]
        ids = np.full((1, TEXT_LEN), PAD_ID, np.int64)
        mask = np.zeros((1, TEXT_LEN), np.int64)
        ids[0, : len(encoding.ids)] = encoding.ids
        mask[0, : len(encoding.ids)] = 1
        return Tokens(ids, mask, total, cut)
