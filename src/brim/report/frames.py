"""Tables as pandas DataFrames, where pandas is installed."""

from collections.abc import Mapping, Sequence
from typing import Any

from brim.errors import ConfigError


def data_frame(columns: Mapping[str, Any], index: Sequence[Any] | None = None) -> Any:
    """A DataFrame of columns, or a sentence that says what to install."""
    try:
        import pandas
    except ImportError as failure:
        raise ConfigError(
            "pandas is missing to make a DataFrame", code="missing_package", hint="pip install 'brim[pandas]'"
        ) from failure
    return pandas.DataFrame(dict(columns), index=index)
