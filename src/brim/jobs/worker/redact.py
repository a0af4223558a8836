"""Texts for people elsewhere: without paths, host names and user names of this machine.

Messages of the library name files, as they should on a command line. What leaves through the API names datasets.
"""

import getpass
import re
import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

_BEFORE = r"(?<![\w./:~-])"
# A path in quotes may hold spaces; a bare one ends at a space, a quote or closing punctuation.
_QUOTED = re.compile(r"""(?P<quote>["'])(?:/|~/|[A-Za-z]:[\\/])[^"'\n]*(?P=quote)""")
_BARE = re.compile(_BEFORE + r"""(?:~?/(?!/)[^\s"'`,;:()<>|]+|[A-Za-z]:\\[^\s"'`,;()<>|]+)""")
_FILE_URL = re.compile(r"""\bfile://[^\s"']+""")
_CREDENTIALS = re.compile(r"""\b([a-z][a-z0-9+]*)://[^\s"'/@]*(?::[^\s"'@]*)?@[^\s"']+""")
_COMMON = frozenset({"", "root", "user", "admin", "ubuntu", "nobody", "localhost", "brim", "localhost.localdomain"})


class Redactor:
    """Replaces what a text reveals of this machine: known paths by their names, others by (path)."""

    def __init__(self, known: Mapping[Path, str]) -> None:
        """Take the names of known paths, such as {DATA/datasets/ID: 'dataset "night run"'}."""
        paths = {str(path): name for path, name in known.items() if len(str(path)) > 1}
        paths |= {str(Path(path).resolve()): name for path, name in paths.items()}
        longest_first = sorted(paths.items(), key=lambda item: -len(item[0]))
        self._known = [(re.compile(re.escape(path) + r"(?![\w.-])(/?)"), name) for path, name in longest_first]
        self._words = _own_words()

    def __call__(self, text: str) -> str:
        for path, name in self._known:
            text = path.sub(partial(_named, name), text)
        text = _FILE_URL.sub("(path)", text)
        text = _CREDENTIALS.sub(r"\1://(host)", text)
        text = _QUOTED.sub("(path)", text)
        text = _BARE.sub("(path)", text)
        for word, stand_in in self._words:
            text = word.sub(stand_in, text)
        return text

    def values(self, value: Any) -> Any:
        """Redact every text in a JSON value; keys stay."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {key: self.values(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.values(item) for item in value]
        return value


def _named(name: str, match: re.Match[str]) -> str:
    """The name instead of the path; a file within it follows after a space."""
    return f"{name} " if match[1] else name


def _own_words() -> list[tuple[re.Pattern[str], str]]:
    """Host and user names, except those that are common words."""
    host = socket.gethostname()
    hosts = {host, host.partition(".")[0]}
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a number without an entry, as in containers
        user = ""
    words = [(name, "(host)") for name in hosts] + [(user, "(user)")]
    telling = [(name, stand_in) for name, stand_in in words if len(name) > 2 and name.lower() not in _COMMON]
    kept = sorted(telling, key=lambda item: -len(item[0]))
    return [(re.compile(rf"(?<![\w.-]){re.escape(name)}(?![\w-])"), stand_in) for name, stand_in in kept]
