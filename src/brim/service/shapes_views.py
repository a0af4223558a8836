"""What answers look like that charts and maps are drawn from. Latitudes and longitudes are WGS-84 degrees."""

from typing import Annotated, Literal

from pydantic import Field

from brim.service.shapes import Shape


class Histogram(Shape):
    """How often values occur: counts[k] lie from edges[k] to edges[k + 1]; only finite ones are counted."""

    edges: list[float] = Field(description="one more than counts; they grow by a factor where values span decades")
    counts: list[int]
    unit: str = Field(description="of the edges; 1 for a plain number")


class Place(Shape):
    """Where something is."""

    lat: float
    lon: float
    alt_m: float = Field(description="of the ground above the ellipsoid")


class NamedPlace(Place):
    """A receiver."""

    name: str


class Transmitter(Shape):
    """Where a sample's transmitter is, and how well it can be placed."""

    index: int = Field(description="row of the dataset, as samples/{index} takes it")
    lat: float
    lon: float
    snr_db: float | None = Field(description="measured by the receiver that heard it best")
    gdop: float | None
    crlb_m: float | None


class RfStatistics(Shape):
    """Of the radio samples that are written, also while more are."""

    kind: Literal["rf"] = "rf"
    samples: int
    complete: bool = Field(description="false while it is being written, and where that was stopped")
    attempted: int | None
    acceptance_rate: float | None
    rejected: dict[str, int] = Field(description="attempts by the reason for which they are no sample")
    histograms: dict[Literal["snr_db", "gdop", "crlb_m"], Histogram] = Field(
        description="snr_db as measured, of every receiver that heard; of large datasets evenly taken samples"
    )
    receivers: list[NamedPlace] = Field(description="of a fixed network; none where each sample has its own")
    transmitters: list[Transmitter] = Field(description="at most 2000, evenly taken")


class ImageSize(Shape):
    """How many images are of one size, in pixels."""

    width: int
    height: int
    count: int


class ImageStatistics(Shape):
    """Of images."""

    kind: Literal["images"] = "images"
    items: int
    masks: int = Field(description="images that have one; 0 or all")
    sizes: list[ImageSize] = Field(description="the most frequent first, at most 1000")
    unreadable: int = Field(description="images whose size cannot be read")


class SequenceStatistics(Shape):
    """Of packed sequences."""

    kind: Literal["sequences"] = "sequences"
    items: int
    features: int = Field(description="values of a frame")
    classes: dict[str, int] = Field(description="sequences by label; empty where none has one")
    unlabelled: int
    histograms: dict[Literal["frames"], Histogram]


Statistics = Annotated[RfStatistics | ImageStatistics | SequenceStatistics, Field(discriminator="kind")]


class SpectrumShape(Shape):
    """Mean power density of a receiver's record by Welch's method, absolute: in dBm/Hz."""

    frequency_hz: list[float] = Field(description="from the carrier, at most 512")
    power_db: list[float] = Field(description="dBm/Hz")
    noise_db: float | None = Field(description="dBm/Hz that the receiver's noise alone has")


class SampleReceiver(NamedPlace):
    """What one receiver had of a sample."""

    snr_db: float | None = Field(description="measured in the 12.5 kHz channel; null where it did not hear")
    link_snr_db: float | None = Field(description="mean of the link, also where too weak to be heard")
    heard: bool
    spectrum: SpectrumShape | None = Field(description="null where it did not hear")


class Sample(Shape):
    """One radio sample; its IQ is made again where the dataset keeps none."""

    index: int = Field(description="row of the dataset")
    attempt: int = Field(description="number that, with the seed, makes the sample")
    transmitter: Place
    gdop: float | None
    crlb_m: float | None
    receivers: list[SampleReceiver]
    note: str | None = Field(description="why there are no spectra, where there are none")
