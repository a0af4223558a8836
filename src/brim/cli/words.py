"""What somebody meant: the nearest valid word for a command, an option or a choice that does not exist."""

import difflib
import re
from collections.abc import Collection, Iterator
from typing import Any

_NO_COMMAND = re.compile(r"No such command ['\"](?P<word>.*?)['\"]\.")


def nearest(word: str, choices: Collection[str]) -> str | None:
    """The choice most like a word, whatever its case; None where none is like it."""
    by_lower = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), by_lower, 1, cutoff=0.5)
    return by_lower[near[0]] if near else None


def usage(failure: Exception) -> str:
    """What a usage error says, beginning in lower case, with the nearest word where one is unknown."""
    message = str(failure.format_message() if hasattr(failure, "format_message") else failure)
    context = getattr(failure, "ctx", None)
    if context is not None and (unknown := getattr(failure, "option_name", None)) and hasattr(failure, "possibilities"):
        names = [name for param in context.command.params for name in (*param.opts, *param.secondary_opts)]
        return _asked("option", unknown, [nearest(unknown, [name for name in names if name.startswith("-")])])
    if context is not None and (found := _NO_COMMAND.match(message)):
        return _asked("command", found["word"], _commands(found["word"], context))
    return message[:1].lower() + message[1:]


def _asked(thing: str, word: str, near: list[str | None]) -> str:
    meant = [repr(name) for name in near if name is not None]
    either = " or ".join(filter(None, (", ".join(meant[:-1]), *meant[-1:])))
    return f"no such {thing} {word!r}" + (f"; did you mean {either}?" if meant else "")


def _commands(word: str, context: Any) -> list[str | None]:
    """The nearest command: of this group by its name, of others by their paths; they may be many."""
    everywhere = dict(_tree(context.find_root().command, "brim"))
    name = nearest(word, set(everywhere.values()))
    if name in context.command.commands:
        return [name]
    return [path for path, last in everywhere.items() if last == name]


def _tree(group: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every command below a group: its whole path, and its own name."""
    for name, command in group.commands.items():
        yield f"{path} {name}", name
        if hasattr(command, "commands"):
            yield from _tree(command, f"{path} {name}")
