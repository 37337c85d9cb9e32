"""What exists: the catalogue of models, their configuration, their files.

Knows: names, geometry, checkpoints, where artefacts lie. Doesn't know: graphs, engines, sound.
"""

import os

# ONNX Runtime 1.32 keeps an identifier in ~/.cache and reports its use over the network unless this
# is set before it is imported. Every package of the project imports this one first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
