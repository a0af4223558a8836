"""Networks of users: Python code, an installed package or a traced program."""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.engine.networks.code import NetworkFactory as NetworkFactory
    from brim.engine.networks.code import check_module as check_module
    from brim.engine.networks.code import factory_of as factory_of
    from brim.engine.networks.code import make_module as make_module
    from brim.engine.networks.code import source_of_object as source_of_object
    from brim.engine.networks.program import ProgramModule as ProgramModule
    from brim.engine.networks.program import import_onnx as import_onnx
    from brim.engine.networks.program import is_program as is_program
    from brim.engine.networks.program import load_program as load_program
    from brim.engine.networks.program import program_suffixes as program_suffixes
    from brim.engine.networks.source import NetworkSource as NetworkSource
    from brim.engine.networks.source import declared as declared
    from brim.engine.networks.source import find_source as find_source
    from brim.engine.networks.source import is_reference as is_reference
    from brim.engine.networks.source import named_source as named_source
    from brim.engine.networks.source import title_of as title_of

__getattr__, __all__ = lazy(__name__, __file__)
