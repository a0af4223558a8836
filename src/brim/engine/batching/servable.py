"""What a model offers so that requests that arrive together can run together, and what crosses to it.

    inspect → decode → forward → collect → finish
    caller    a pool   device     collector  a pool

The runner calls these and knows nothing else of a model: not its images, its device or its network.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Payload:
    """What a client sent: the bytes of one file or body, its name and its options."""

    data: memoryview | bytes
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a payload's header tells before it is decoded."""

    key: Hashable  # only parts of like key share a batch: shape, dtype, options that change the forward
    parts: int = 1  # places it takes in batches
    cost: float = 1.0  # work of a part, in any unit (pixels): guesses the time of a key not yet seen from those seen
    sizes: Sequence[int] | None = None  # batch sizes for this key, where they differ from the model's
    expected_s: Mapping[int, float] = field(default_factory=dict)  # seconds by batch size, as warm-up measured them


@dataclass(slots=True)
class DecodedRequest:
    """A decoded request; a model may keep more in a subclass, or in context."""

    key: Hashable  # as in Shape; where the header was wrong, this one holds
    parts: list[Any]
    context: Any = None  # whatever finish needs; the runner never looks at it


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    media_type: str = "application/octet-stream"
    facts: Mapping[str, Any] = field(default_factory=dict)  # such as polygons; the runner adds "seconds" by stage


class Servable(Protocol):
    """One loaded model. Every method may raise; the exception becomes that of the requests it was called for."""

    @property
    def sizes(self) -> Sequence[int]:
        """Batch sizes that may run, ascending from 1 up to the tuned one."""
        ...

    def inspect(self, payload: Payload) -> RequestShape:
        """Tell key and number of parts from the header, cheaply; refuse here what can be refused now."""
        ...

    def decode(self, payload: Payload) -> DecodedRequest:
        """Bytes → parts, in a decode thread; the payload's memory may be reused after it returns."""
        ...

    def forward(self, parts: list[Any]) -> Any:
        """Queue a batch on the device, in the device thread only, and return what collect takes; need not wait."""
        ...

    def collect(self, running: Any) -> list[Any]:
        """Wait for what forward queued, in the collect thread; an output or an exception per part, in order."""
        ...

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """All outputs of a request, in the order of its parts → its answer, in a finish thread."""
        ...

    def close(self) -> None:
        """Give back what the model holds; nothing of it runs any more."""
        ...
