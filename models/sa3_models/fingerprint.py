"""Which checkpoint is this? A quick answer from its content.

Knows: the safetensors file layout. Doesn't know: what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sa3_models.errors import CheckpointError

__all__ = ["fingerprint"]

_SAMPLE = 4096  # bytes read at the start of every tensor
_HEADER_MAX = 100_000_000  # bytes; the format's own limit


def fingerprint(directory: Path) -> str:
    """Hex SHA-256 of a checkpoint directory's configuration, headers and a sample of every tensor.

    Reads `model_config.json`, and of each `*.safetensors` file (the text encoder's included) its
    header and the first 4 KiB of every tensor: megabytes instead of gigabytes, and any training
    step changes it. File and folder names outside the directory don't matter.

    Raises:
        CheckpointError: a safetensors file is cut or is none.
    """
    digest = hashlib.sha256()
    config = directory / "model_config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(directory.glob("**/*.safetensors")):
        digest.update(path.relative_to(directory).as_posix().encode())
        _sample(path, digest)
    return digest.hexdigest()


def _sample(path: Path, digest: hashlib._Hash) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_MAX):
            raise CheckpointError(
                f"{path.name} is not a complete safetensors file",
                found=f"{size:,} bytes, header of {length:,}",
                hint="copy or pull it again",
            )
        header = file.read(length)
        digest.update(header)
        try:
            entries = json.loads(header)
            spans = sorted(v["data_offsets"] for k, v in entries.items() if k != "__metadata__")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointError(
                f"{path.name} is not a safetensors file", found=f"its header: {error}"
            ) from error
        for begin, end in spans:
            file.seek(8 + length + begin)
            digest.update(file.read(min(_SAMPLE, end - begin)))
