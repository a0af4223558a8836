"""Networks by name: brim's own and those a user registers."""

from collections.abc import Callable

from torch import nn

from brim.errors import ConfigError
from brim.segmentation.config import REGISTERED, check_network, network_names
from brim.segmentation.networks.hrnet import HRNet
from brim.segmentation.networks.resunet import ResUNetAdvanced, ResUNetSmall, UNetTiny

Factory = Callable[[], nn.Module]

_BUILT_IN: dict[str, Factory] = {
    "hrnet": HRNet,
    "resunet_small": ResUNetSmall,
    "resunet_advanced": ResUNetAdvanced,
    "unet_tiny": UNetTiny,
}


def create_model(name: str) -> nn.Module:
    """A new network of that name with random weights: (B, 3, H, W) normalised → logits (B, 1, H, W)."""
    return find_model(name)()


def register_model(name: str, factory: Factory, *, replace: bool = False) -> None:
    """Make a network of your own known by name; factory() returns a new nn.Module with random weights.

    It takes (B, 3, H, W) float images and returns (B, 1, H, W) logits.
    """
    if not name or not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
        raise ConfigError(f'model name "{name}" must be letters, digits, "_", "-" or "."')
    if name in network_names() and not replace:
        raise ConfigError(f'model "{name}" is registered already; choose another name or pass replace=True')
    if not callable(factory):
        raise ConfigError(f'model "{name}": factory is a {type(factory).__name__}, expected a function that makes one')
    REGISTERED[name] = factory


def model_names() -> tuple[str, ...]:
    """Every name create_model knows."""
    return network_names()


def find_model(name: str) -> Factory:
    """The function that makes the network of that name."""
    check_network(name)
    return REGISTERED.get(name) or _BUILT_IN[name]
