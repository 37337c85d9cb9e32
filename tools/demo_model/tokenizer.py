"""A byte-pair tokenizer with Gemma's conventions, learnt from the captions.

Conventions: pad 0, eos 1, bos 2, unk 3, mask 4, then 256 byte tokens; a space becomes U+2581;
no lower-casing, no BOS or EOS, padding on the right; digits stand alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
CONFIG = {
    "add_bos_token": False,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "mask_token": "<mask>",
    "padding_side": "right",
    "model_max_length": 1000000000000000019884624838656,
    "clean_up_tokenization_spaces": False,
    "tokenizer_class": "GemmaTokenizer",
}


def learn(captions: Iterable[str], vocab: int) -> Tokenizer:
    """A tokenizer of exactly `vocab` entries."""
    # merges learnt word by word, so that the finished one may run over the whole text
    learner = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    learner.normalizer = normalizers.Replace(" ", "▁")
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    alphabet = [chr(c) for c in range(33, 127)] + ["▁"]
    learner.train_from_iterator(
        captions,
        trainers.BpeTrainer(
            vocab_size=vocab - 256 - len(SPECIAL),
            initial_alphabet=alphabet,
            min_frequency=30,
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get)
    entries = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    entries += [f"<unused{i}>" for i in range(vocab - len(entries))]
    final = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(entries)},
            merges=[tuple(merge) for merge in learnt["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    final.normalizer = normalizers.Replace(" ", "▁")
    final.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    final.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    final.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return final


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def encode(tokenizer: Tokenizer, captions: list[str], length: int) -> tuple[list, list]:
    """Ids and mask, each [N][length], padded on the right with 0."""
    ids, mask = [], []
    for encoding in tokenizer.encode_batch(captions):
        row = encoding.ids[:length]
        ids.append(row + [0] * (length - len(row)))
        mask.append([1] * len(row) + [0] * (length - len(row)))
    return ids, mask
