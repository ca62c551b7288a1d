"""The hashes of ids, and where a table may have an id's row: NumPy alone."""

from __future__ import annotations

from typing import Any

import numpy as np

WAYS = 16
"""Rows in a bucket."""
BUCKETS = 64
"""Buckets in a group."""
GROUP = WAYS * BUCKETS
"""Rows in a group."""
INCREMENT, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele et al., Fast Splittable Pseudorandom Number Generators, 2014)."""
TEXT_HASHES = 2**63 - 1
"""The number of ids of strings."""
_BITS = 2**64 - 1
_K0, _K1, _K2 = 0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F
"""Constants of FarmHash (Pike, 2014), whose `Fingerprint64` is the hash of strings."""


def hashed(ids: np.ndarray) -> np.ndarray:
    """Returns the key of each id, int64. Different ids have different keys."""
    value: np.ndarray = ids.astype(np.int64).view(np.uint64) + np.uint64(INCREMENT)
    for shift, factor in ((30, FIRST), (27, SECOND), (31, 1)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    keys: np.ndarray = value.view(np.int64)
    return keys


def unhashed(keys: np.ndarray) -> np.ndarray:
    """Returns the ids of keys."""
    value = keys.view(np.uint64)
    for shift, factor in ((31, 1), (27, SECOND), (30, FIRST)):
        value = value * np.uint64(pow(factor, -1, 2**64))
        value = value ^ (value >> np.uint64(shift)) ^ (value >> np.uint64(2 * shift))
    ids: np.ndarray = (value - np.uint64(INCREMENT)).view(np.int64)
    return ids


def candidates(keys: np.ndarray, rows: int) -> np.ndarray:
    """Returns the two buckets that may have each key, int64, shape (n, 2), in a table of so many rows."""
    bits = keys.view(np.uint64)
    group = ((bits >> np.uint64(32)) * np.uint64(rows // GROUP)) >> np.uint64(32)
    first = (keys & (BUCKETS - 1)).astype(np.int64)
    step = ((keys >> (BUCKETS.bit_length() - 1)) & (BUCKETS - 1)) | 1
    buckets: np.ndarray = group.astype(np.int64)[:, None] * BUCKETS + np.stack([first, first ^ step], axis=1)
    return buckets


def as_ids(ids: Any) -> np.ndarray:
    """Returns ids as int64, in their shape. A string is represented by its hash, as in training.

    Args:
        ids: integers, texts or bytes. Surrogates in texts stand for bytes that are not UTF-8.
    """
    given = np.asarray(ids)
    if given.dtype.kind in "iub":
        return given.astype(np.int64)
    own = given.reshape(-1).tolist()
    texts = [each if isinstance(each, bytes) else str(each).encode("utf-8", "surrogateescape") for each in own]
    return np.array([fingerprint(each) % TEXT_HASHES for each in texts], np.int64).reshape(given.shape)


def fingerprint(text: bytes) -> int:
    """Returns FarmHash's `Fingerprint64` of some bytes."""
    size = len(text)
    if size > 64:
        return _of_long(text)
    if size > 32:
        return _of_33_to_64(text, _K2 + 2 * size)
    return _of_17_to_32(text, _K2 + 2 * size) if size > 16 else _of_short(text, _K2 + 2 * size)


def _of_17_to_32(text: bytes, scale: int) -> int:
    size = len(text)
    a, b = _word(text, 0) * _K1, _word(text, 8)
    c, d = _word(text, size - 8) * scale, _word(text, size - 16) * _K2
    return _mixed(_turned(a + b, 43) + _turned(c, 30) + d, a + _turned(b + _K2, 18) + c, scale)


def _of_short(text: bytes, scale: int) -> int:
    size = len(text)
    if size >= 8:
        a, b = _word(text, 0) + _K2, _word(text, size - 8)
        return _mixed(_turned(b, 37) * scale + a, (_turned(a, 25) + b) * scale, scale)
    if size >= 4:
        first, last = (int.from_bytes(text[at : at + 4], "little") for at in (0, size - 4))
        return _mixed(size + (first << 3), last, scale)
    if size:
        y, z = text[0] + (text[size >> 1] << 8), size + (text[-1] << 2)
        return _folded((y * _K2 ^ z * _K0) & _BITS) * _K2 & _BITS
    return _K2


def _of_33_to_64(text: bytes, scale: int) -> int:
    size = len(text)
    a, b = _word(text, 0) * _K2, _word(text, 8)
    c, d = _word(text, size - 8) * scale, _word(text, size - 16) * _K2
    y = _turned(a + b, 43) + _turned(c, 30) + d
    z = _mixed(y, a + _turned(b + _K2, 18) + c, scale)
    e, f = _word(text, 16) * scale, _word(text, 24)
    g, h = (y + _word(text, size - 32)) * scale, (z + _word(text, size - 24)) * scale
    return _mixed(_turned(e + f, 43) + _turned(g, 30) + h, e + _turned(f + a, 18) + g, scale)


def _of_long(text: bytes) -> int:
    seed, rest = 81, (len(text) - 1) % 64
    y = (seed * _K1 + 113) & _BITS
    z = _folded((y * _K2 + 113) & _BITS) * _K2 & _BITS
    x = (seed * _K2 + _word(text, 0)) & _BITS
    v, w = (0, 0), (0, 0)
    for at in range(0, len(text) - 1 - rest, 64):
        x, y, z, v, w = _block(text, at, (x, y, z, v, w), _K1, (1, 1))
    scale = (_K1 + ((z & 0xFF) << 1)) & _BITS
    w = w[0] + rest, w[1]
    v = v[0] + w[0], v[1]
    w = w[0] + v[0], w[1]
    x, y, z, v, w = _block(text, len(text) - 64, (x, y, z, v, w), scale, (9, 9))
    first = _mixed(v[0], w[0], scale) + _folded(y) * _K0 + z
    return _mixed(first, _mixed(v[1], w[1], scale) + x, scale)


def _block(text: bytes, at: int, state: Any, scale: int, weights: tuple[int, int]) -> Any:
    """The state after 64 more bytes."""
    x, y, z, v, w = state
    x = _turned(x + y + v[0] + _word(text, at + 8), 37) * scale
    y = _turned(y + v[1] + _word(text, at + 48), 42) * scale
    x = (x ^ (w[1] * weights[0])) & _BITS
    y = (y + v[0] * weights[1] + _word(text, at + 40)) & _BITS
    z = _turned(z + w[0], 33) * scale & _BITS
    v = _weak(text, at, v[1] * scale, x + w[0])
    w = _weak(text, at + 32, z + w[1], y + _word(text, at + 16))
    return z, y, x, v, w


def _weak(text: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    first, second, third, last = (_word(text, at + 8 * n) for n in range(4))
    a = (a + first) & _BITS
    b = _turned(b + a + last, 21)
    c = a
    a = (a + second + third) & _BITS
    return (a + last) & _BITS, (b + _turned(a, 44) + c) & _BITS


def _word(text: bytes, at: int) -> int:
    return int.from_bytes(text[at : at + 8], "little")


def _turned(value: int, bits: int) -> int:
    value &= _BITS
    return (value >> bits | value << (64 - bits)) & _BITS


def _folded(value: int) -> int:
    return value ^ (value >> 47)


def _mixed(first: int, second: int, scale: int) -> int:
    first, second = first & _BITS, second & _BITS
    a = _folded((first ^ second) * scale & _BITS)
    return _folded((second ^ a) * scale & _BITS) * scale & _BITS
