"""What exists: the catalogue of models, their configuration, their files.

Knows: names, geometry, checkpoints, where artefacts lie. Doesn't know: graphs, engines, sound.
"""

__version__ = "0.1.0"
