"""Messages of a protobuf file, field by field, without its schema.

Knows: the wire format. Doesn't know: what a field means, files. Bytes that are no message raise
IndexError or ValueError. Parts are views: nothing is copied but strings that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["fields", "first_message", "messages", "number_of", "text_of", "varints"]


def fields(view: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(field number, integer or bytes) of a protobuf message; fixed-width fields are skipped."""
    at = 0
    while at < len(view):
        key, at = _varint(view, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(view, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(view, at)
            if at + size > len(view):
                raise ValueError("field beyond the end")
            yield number, view[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")


def messages(view: memoryview, wanted: int) -> Iterator[memoryview]:
    """The length-delimited fields of that number: messages, strings, packed numbers."""
    return (v for n, v in fields(view) if n == wanted and not isinstance(v, int))


def first_message(view: memoryview, wanted: int) -> memoryview:
    """The first length-delimited field of that number, which must be there.

    Raises:
        StopIteration: it isn't.
    """
    return next(messages(view, wanted))


def text_of(view: memoryview, wanted: int) -> str:
    """The string of that number, "" without one."""
    return bytes(next(messages(view, wanted), b"")).decode()


def number_of(view: memoryview, wanted: int) -> int:
    """The integer of that number, 0 without one."""
    return next((v for n, v in fields(view) if n == wanted and isinstance(v, int)), 0)


def varints(view: memoryview) -> Iterator[int]:
    """The integers of a packed field."""
    at = 0
    while at < len(view):
        value, at = _varint(view, at)
        yield value


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("varint too long")
