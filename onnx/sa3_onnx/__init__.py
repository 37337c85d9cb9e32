"""From a checkpoint to ONNX: graphs are authored in a small vocabulary, never traced.

Knows: the mathematics of every stage, precision, lowering per target. Doesn't know: engines,
requests, sound.
"""
