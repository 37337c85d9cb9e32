"""The verbs of the command line, one small module each, loaded when they are used.

Knows: words, flags, files, exit codes. Doesn't know: how sound is made.
"""
