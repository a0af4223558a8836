"""How a setting is declared once, and everything that is made from the declaration.

A setting is a field of a frozen dataclass:

    frequency_mhz: Annotated[float, Range(30, 3000), Unit("MHz"), Doc("Carrier frequency.")] = 145.0

`check` validates an instance (call it first in `__post_init__`), `read` makes one from plain JSON or TOML values,
`settings` lists its fields, `schema` describes it as JSON schema and `table` as Markdown. Command-line options, request
bodies, form fields and the tables in the documentation all come from here. Nothing in this package imports torch.
"""

from brim.config.read import check, read
from brim.config.schema import schema, table
from brim.config.settings import Doc, Length, OneOf, Range, Setting, Unit, nearest, settings

__all__ = [
    "Doc",
    "Length",
    "OneOf",
    "Range",
    "Setting",
    "Unit",
    "check",
    "nearest",
    "read",
    "schema",
    "settings",
    "table",
]
