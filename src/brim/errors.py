"""Every exception brim raises on purpose.

    BrimError                  something the user can act on; the command line prints it and exits with 2
    ├── ConfigError            a value, option or combination that cannot work
    │   ├── NothingAccepted    a configuration whose gates refuse every sample
    │   └── FieldError         the same, of a request, with the field's name
    │       ├── FieldConflict  the same, right by itself but not with the other fields or what is there; a Conflict too
    │       └── FieldNotFound  the same, an id that names nothing; a NotFound too
    ├── DatasetError           a dataset directory that is missing, foreign, occupied or inconsistent
    │   └── ShardCorrupt       a shard whose bytes differ from the manifest
    ├── ImageError             an image or mask that cannot be read or used
    ├── TooLarge               a request whose body, or what it unpacks to, is above a limit
    ├── UnsupportedType        a request whose file is of no kind that is read there
    ├── CheckpointError        a checkpoint that is missing, damaged, or of another model or run
    ├── TrainingDiverged       a loss or weight that is no longer a finite number
    ├── StorageError           the file system or an object store refused: full, no permission, no answer
    ├── ClusterError           a cluster that does not answer, whose nodes differ, or that lost its workers
    ├── DeviceError            a device that is not there or cannot be used
    │   └── RankLost           another rank of a training, which failed or is gone
    ├── NotFound               an id that names nothing
    ├── Conflict               what the state of a thing does not allow now, such as deleting what is in use
    ├── TooMany                more than a limit allows at once
    ├── Unavailable            a database, or the service itself, that does not answer for now
    ├── Overloaded             a request that could not be answered by its deadline; says when to come again
    ├── DeadlinePassed         a request that was accepted, but whose deadline passed before it ran
    └── OutOfMemory            a batch that does not fit; halved and retried wherever a batch can be halved

A message names the thing, its value, what was expected and the next step.
"""


class BrimError(Exception):
    """Base of all errors brim raises on purpose."""


class ConfigError(BrimError):
    """A configuration value, option or combination that cannot work."""


class NothingAccepted(ConfigError):
    """The gates refused every sample within the bounded number of tries."""


class FieldError(ConfigError):
    """A value of a request that cannot work; field is its name, such as config.batch_size."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class DatasetError(BrimError):
    """A dataset directory that is missing, foreign, occupied or inconsistent."""


class ShardCorrupt(DatasetError):
    """A shard whose bytes differ from what the manifest records."""


class CheckpointError(BrimError):
    """A checkpoint that is missing, damaged, or of another model or run."""


class TrainingDiverged(BrimError):
    """A loss or weight that is no longer a finite number; the checkpoint before it stays."""


class StorageError(BrimError):
    """The file system or an object store refused: full, read-only, no permission, no answer."""


class ClusterError(BrimError):
    """A cluster that does not answer, whose nodes differ, or that lost its workers."""


class DeviceError(BrimError):
    """A device that is not there or cannot be used."""


class RankLost(DeviceError):
    """Another rank of a training failed or is gone, and this one cannot go on without it."""


class OutOfMemory(BrimError):
    """A batch that does not fit in memory."""


class ImageError(BrimError):
    """An image or mask that cannot be read or used."""


class TooLarge(BrimError):
    """A request whose body, or what it unpacks to, is above a limit."""


class UnsupportedType(BrimError):
    """A request whose file is of no kind that is read there."""


class NotFound(BrimError):
    """An id that names nothing."""


class Conflict(BrimError):
    """What the state of a thing does not allow now."""


class TooMany(BrimError):
    """More than a limit allows at once; the next step is to wait."""


class Unavailable(BrimError):
    """A database, or the service itself, that does not answer for now."""


class Overloaded(BrimError):
    """A request refused at once, because it could not be answered by its deadline beside those accepted before."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(BrimError):
    """A request that was accepted, but that could no longer be answered in time when its turn came."""


class FieldConflict(FieldError, Conflict):
    """A value of a request that is right by itself, but not with another one or with what is there now."""


class FieldNotFound(FieldError, NotFound):
    """An id in a request that names nothing."""
