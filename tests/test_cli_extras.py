"""Commands that need the service's extra say how to get it."""

import pytest

from brim.cli.options import needing_service
from brim.errors import ConfigError


def test_a_missing_extra_is_named_with_its_install():
    with (
        pytest.raises(
            ConfigError, match=r"nowhere is not installed; the catalogue needs: pip install 'brim\[service\]'"
        ),
        needing_service("the catalogue"),
    ):
        import nowhere  # noqa: F401


def test_a_module_of_our_own_that_is_missing_is_our_own_mistake():
    with pytest.raises(ModuleNotFoundError, match="brim"), needing_service("the catalogue"):
        import brim.nowhere  # noqa: F401
