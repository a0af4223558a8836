"""How a setting is declared once, and everything that is made from the declaration.

A setting is a field of a frozen dataclass:

    frequency_mhz: Annotated[float, Range(30, 3000), Unit("MHz"), Doc("Carrier frequency.")] = 145.0

`check` validates an instance (call it first in `__post_init__`), `read` makes one from plain JSON or TOML values and
`plain` turns it back; `part` takes the settings of a base class out of a larger configuration. `settings` lists the
fields, `schema` describes them as JSON schema. Command-line options, request bodies, form
fields and the tables in the documentation all come from here. Nothing in this package imports torch.
"""

from brim.config.read import check, part, plain, raise_all, read
from brim.config.schema import schema
from brim.config.settings import PRINTABLE, Doc, Length, OneOf, Range, Setting, Unit, nearest, settings

__all__ = [
    "PRINTABLE",
    "Doc",
    "Length",
    "OneOf",
    "Range",
    "Setting",
    "Unit",
    "check",
    "nearest",
    "part",
    "plain",
    "raise_all",
    "read",
    "schema",
    "settings",
]
