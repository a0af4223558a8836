"""A JSON body, read with care: its type, its nesting, no NaN, no key twice, no half characters."""

import json
from typing import Any, NoReturn

from fastapi import Request
from starlette.exceptions import HTTPException

MAX_NESTING = 50


class Unreadable(HTTPException):
    """A body that is no JSON, or not said to be: 400 or 415."""


async def read_json(request: Request) -> Any:
    """The value of a request's body."""
    body = await request.body()  # first, so that the client gets to read a refusal
    check_type(request)
    return parse(body)


def check_type(request: Request) -> None:
    """Refuse a body that is not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Unreadable(415, f'the body is of type "{kind[:60]}"; send JSON with Content-Type: application/json')


def parse(body: bytes) -> Any:
    """The value of a JSON text; what is wrong with it in words."""
    try:
        value = json.loads(
            body.decode(), parse_float=_number, parse_constant=_refuse_constant, object_pairs_hook=_without_twins
        )
    except UnicodeDecodeError:
        _refuse("it is not UTF-8")
    except RecursionError:
        _refuse(f"it is nested deeper than {MAX_NESTING} levels")
    except json.JSONDecodeError as failure:
        _refuse(f"{failure.msg.lower()} at line {failure.lineno}, column {failure.colno}")
    except ValueError as failure:  # ours, and a whole number of thousands of digits
        _refuse(str(failure) if isinstance(failure, _Refused) else "a number is too long")
    _check(value, MAX_NESTING)
    return value


def _number(text: str) -> float | int:
    """8.0 is the whole number 8: JSON has but one kind of number."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


class _Refused(ValueError):
    pass


def _refuse(reason: str) -> NoReturn:
    raise Unreadable(400, f"the body is no valid JSON: {reason}")


def _refuse_constant(name: str) -> NoReturn:
    raise _Refused(f"{name} is no number that JSON knows")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):  # else the last would count, and nobody would say so
        raise _Refused("a key occurs twice in one object")
    return found


def _check(value: Any, depth: int) -> None:
    """No deeper than it may be, and no text that cannot be written down again."""
    if depth < 0:
        _refuse(f"it is nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse("a text holds half of a character (a lone surrogate)")
    elif isinstance(value, dict):
        for key, item in value.items():
            _check(key, depth)
            _check(item, depth - 1)
    elif isinstance(value, list):
        for item in value:
            _check(item, depth - 1)
