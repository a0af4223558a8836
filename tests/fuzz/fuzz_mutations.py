"""Damaged copies of valid inputs: flipped bits, cuts, splices, edited length fields, odd values in JSON."""

import copy
import json
import random
from collections.abc import Sequence
from typing import Any

_BYTES = (0x00, 0x01, 0x20, 0x7F, 0x80, 0xFE, 0xFF)
_NUMBERS = (0, 1, 2, 7, 255, 256, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_LONG = 2**19  # bytes of a repeated piece, at most
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", "0", "\0", "../../x", "é\ud800"[:1], "x" * 3000, [], {}, [[]], [0] * 50, {"": None}, [{}], {"a": {"b": []}}),
)


def mutate(rng: random.Random, seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """One of the seeds with one to six changes, seldom none."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        _change(rng, data, seeds, tokens)
    if data and rng.random() < 0.003:  # time and memory must not grow faster than the input
        at = rng.randrange(len(data))
        piece = data[at : at + rng.choice((1, 2, 4, 12, 100))]
        data[at:at] = piece * (rng.randrange(_LONG) // len(piece))
    return bytes(data)


def _change(rng: random.Random, data: bytearray, seeds: Sequence[bytes], tokens: Sequence[bytes]) -> None:
    size = len(data)
    at = rng.choice((rng.randrange(size + 1), min(size, rng.randrange(64))))  # headers more often than the rest
    span = min(size - at, 1 << rng.randrange(8))
    match rng.randrange(11):
        case 0 | 1 if at < size:
            data[at] ^= 1 << rng.randrange(8)
        case 2 if at < size:
            data[at] = rng.choice(_BYTES)
        case 3:
            del data[at:]
        case 4:
            del data[at : at + span]
        case 5:
            data[at:at] = data[at : at + span] * rng.choice((1, 1, 2, 40))
        case 6:
            data[at:at] = rng.randbytes(span)
        case 7:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
        case 8 | 9:
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            number = rng.choice((*_NUMBERS, size, size + 1, max(0, size - 1), rng.randrange(2**16)))
            data[at : at + width] = (number % 256**width).to_bytes(width, order)
        case 10 if tokens:
            data[at : at + rng.choice((0, span))] = rng.choice(tokens)


def mutate_json(rng: random.Random, seeds: Sequence[bytes]) -> bytes:
    """One of the seeds, all JSON, with one to four values replaced, removed, renamed or repeated."""
    value = json.loads(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = _change_value(rng, value)
    return json.dumps(value).encode()


def _change_value(rng: random.Random, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.5:
            return value * rng.choice((-1, 2, 0.5, 1000, 10**12)) + rng.choice((0, 1, -1))
        return copy.deepcopy(rng.choice(_VALUES))
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    match rng.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[rng.choice((*map(str, keys), "x", "", key + "s"))] = value.pop(key)
        case 1:
            value += value[: rng.randrange(3)]
        case _:
            value[key] = _change_value(rng, value[key])
    return value
