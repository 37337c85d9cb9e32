"""ONNX to engines: recipes, profiles, flavours of TensorRT, sidecars.

Knows: how an engine comes to be, and what it needs. Doesn't know: the runtime.
"""
