"""Where files live (a directory or an object store), and datasets of shards with a manifest.

Loaded lazily: checking a path or a URL must not load torch.
"""

from typing import TYPE_CHECKING

from brim.lazy import lazy

if TYPE_CHECKING:
    from brim.engine.storage.dataset import MANIFEST as MANIFEST
    from brim.engine.storage.dataset import Dataset as Dataset
    from brim.engine.storage.dataset import allocate as allocate
    from brim.engine.storage.places import LocalPlace as LocalPlace
    from brim.engine.storage.places import Place as Place
    from brim.engine.storage.places import cache_folder as cache_folder
    from brim.engine.storage.places import cache_home as cache_home
    from brim.engine.storage.places import is_url as is_url
    from brim.engine.storage.places import lock_directory as lock_directory
    from brim.engine.storage.places import place_of as place_of
    from brim.engine.storage.places import sync as sync
    from brim.engine.storage.shard_file import RowFields as RowFields
    from brim.engine.storage.shard_file import ShardEntry as ShardEntry
    from brim.engine.storage.shard_file import ShardPath as ShardPath
    from brim.engine.storage.shard_file import Stored as Stored
    from brim.engine.storage.shard_file import check_bytes as check_bytes
    from brim.engine.storage.shard_file import corrupt as corrupt
    from brim.engine.storage.shard_file import shard_name as shard_name
    from brim.engine.storage.shard_file import unreadable as unreadable
    from brim.engine.storage.shard_file import write_shard as write_shard
    from brim.engine.storage.writer import COMMIT_S as COMMIT_S
    from brim.engine.storage.writer import ShardWriter as ShardWriter
    from brim.engine.storage.writer import Verify as Verify
    from brim.engine.storage.writer import verify as verify

__getattr__, __all__ = lazy(__name__, __file__)
