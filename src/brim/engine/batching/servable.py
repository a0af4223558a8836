"""The interface of a model that serves batched requests, and the data that crosses it.

    inspect → decode → forward → collect → finish
    caller    a pool   device     collector  a pool

The runner calls these methods and knows nothing else about a model: not its images, its device or its network.
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
    """What is known about a request from its header, before it is decoded."""

    key: Hashable  # only parts of equal key share a batch: shape, dtype, options that change the forward pass
    parts: int = 1  # places it takes in batches
    cost: float = 1.0  # work of a part, in any unit (pixels): scales the known times to a key not seen before
    sizes: Sequence[int] | None = None  # batch sizes for this key, where they differ from the model's
    expected_s: Mapping[int, float] = field(default_factory=dict)  # seconds by batch size, as warm-up measured them


@dataclass(slots=True)
class DecodedRequest:
    """A decoded request; a model may keep more in a subclass, or in context."""

    key: Hashable  # as in RequestShape; this one counts if the header was wrong
    parts: list[Any]
    context: Any = None  # for finish; opaque to the runner


@dataclass(frozen=True, slots=True)
class Answer:
    body: bytes
    media_type: str = "application/octet-stream"
    facts: Mapping[str, Any] = field(default_factory=dict)  # such as polygons; the runner adds "seconds" by stage


class Servable(Protocol):
    """One loaded model. Every method may raise; its requests fail with that exception."""

    @property
    def sizes(self) -> Sequence[int]:
        """Batch sizes that may run, ascending from 1 up to the tuned one."""

    def inspect(self, payload: Payload) -> RequestShape:
        """Read key and number of parts from the header, cheaply; raise for requests that can be rejected now."""

    def decode(self, payload: Payload) -> DecodedRequest:
        """Bytes → parts, in a decode thread; the payload's memory may be reused after it returns."""

    def forward(self, parts: list[Any]) -> Any:
        """Launch a batch, in the device thread only, and return a handle for collect; need not wait."""

    def collect(self, running: Any) -> list[Any]:
        """Wait for a launched batch, in the collect thread; an output or an exception per part, in order."""

    def finish(self, item: DecodedRequest, outputs: list[Any]) -> Answer:
        """All outputs of a request, in the order of its parts → its answer, in a finish thread."""

    def close(self) -> None:
        """Release the model's memory; called when nothing of it runs any more."""
