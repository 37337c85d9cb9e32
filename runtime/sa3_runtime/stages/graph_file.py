"""What an ONNX file says about itself, by the names the stages use.

Knows: nothing of its own; `sa3_models.onnx_file` reads.
"""

from __future__ import annotations

from sa3_models.onnx_file import OnnxFile as GraphFile
from sa3_models.onnx_file import read_onnx as read_graph_file

__all__ = ["GraphFile", "read_graph_file"]
