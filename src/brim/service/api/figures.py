"""Answers that charts and maps are drawn from. Latitudes and longitudes are WGS-84 degrees."""

from typing import Annotated, Literal

from pydantic import Field

from brim.service.api.shapes import AnswerModel, JsonObject


class HistogramOut(AnswerModel):
    """How often values occur: counts[k] lie from edges[k] to edges[k + 1]; only finite ones are counted."""

    edges: list[float] = Field(description="one more than counts; they grow by a factor where values span decades")
    counts: list[int]
    unit: str = Field(description="of the edges; 1 for a plain number")


class PositionOut(AnswerModel):
    lat: float
    lon: float
    alt_m: float = Field(description="of the ground above the ellipsoid")


class StationOut(PositionOut):
    name: str


class TransmitterOut(AnswerModel):
    """Where a sample's transmitter is, and how well it can be placed."""

    index: int = Field(description="row of the dataset, as samples/{index} takes it")
    lat: float
    lon: float
    snr_db: float | None = Field(description="measured by the receiver that heard it best")
    gdop: float | None
    crlb_m: float | None


class RfStatisticsOut(AnswerModel):
    """Statistics of the radio samples written so far."""

    kind: Literal["rf"] = "rf"
    samples: int
    complete: bool = Field(description="false while it is being written, and where that was stopped")
    attempted: int | None
    acceptance_rate: float | None
    rejected: dict[str, int] = Field(description="attempts by the reason for which they are no sample")
    histograms: dict[Literal["snr_db", "gdop", "crlb_m"], HistogramOut] = Field(
        description="snr_db as measured, of every receiver that heard; of large datasets evenly taken samples"
    )
    receivers: list[StationOut] = Field(description="of a fixed network; none where each sample has its own")
    transmitters: list[TransmitterOut] = Field(description="at most 2000, evenly taken")


class ImageSizeOut(AnswerModel):
    """How many images are of one size, in pixels."""

    width: int
    height: int
    count: int


class ImageStatisticsOut(AnswerModel):
    kind: Literal["images"] = "images"
    items: int
    masks: int = Field(description="images that have one; 0 or all")
    sizes: list[ImageSizeOut] = Field(description="the most frequent first, at most 1000")
    unreadable: int = Field(description="images whose size cannot be read")


class SequenceStatisticsOut(AnswerModel):
    """Statistics of packed sequences."""

    kind: Literal["sequences"] = "sequences"
    items: int
    features: int = Field(description="values of a frame")
    classes: dict[str, int] = Field(description="sequences by label; empty where none has one")
    unlabelled: int
    histograms: dict[Literal["frames"], HistogramOut]


class RecordingStatisticsOut(AnswerModel):
    kind: Literal["recordings"] = "recordings"
    items: int
    bytes: int


StatisticsOut = Annotated[
    RfStatisticsOut | ImageStatisticsOut | SequenceStatisticsOut | RecordingStatisticsOut, Field(discriminator="kind")
]


class SpectrumOut(AnswerModel):
    """Mean power density of a receiver's record by Welch's method, absolute: in dBm/Hz."""

    frequency_hz: list[float] = Field(description="from the carrier, at most 512")
    power_db: list[float] = Field(description="dBm/Hz")
    noise_db: float | None = Field(description="dBm/Hz that the receiver's noise alone has")


class SampleReceiverOut(StationOut):
    """What one receiver measured of a sample."""

    snr_db: float | None = Field(description="measured in the 12.5 kHz channel; null where it did not hear")
    link_snr_db: float | None = Field(description="mean of the link, also where too weak to be heard")
    heard: bool
    spectrum: SpectrumOut | None = Field(description="null where it did not hear")


class SampleOut(AnswerModel):
    """One radio sample; its IQ is made again where the dataset keeps none."""

    index: int = Field(description="row of the dataset")
    attempt: int = Field(description="number that, with the seed, makes the sample")
    transmitter: PositionOut
    gdop: float | None
    crlb_m: float | None
    receivers: list[SampleReceiverOut]
    note: str | None = Field(description="why there are no spectra, where there are none")


class EllipseOut(AnswerModel):
    """Contains the transmitter with the probability given by the answer's level."""

    semi_major_m: float | None
    semi_minor_m: float | None
    azimuth_deg: float = Field(description="of the longer axis, clockwise from north, 0 to 180")


LatLon = Annotated[list[float], Field(min_length=2, max_length=2, description="latitude and longitude")]


class ErrorPointOut(AnswerModel):
    """The estimated and the true position of a transmitter."""

    truth: LatLon
    estimate: LatLon
    error_m: float | None
    bound_m: float | None = Field(description="Cramér-Rao bound")
    ellipse: EllipseOut


class RunErrorsOut(AnswerModel):
    """How well a locator places transmitters, sample by sample, in its newest evaluation."""

    job_id: str
    dataset_id: str
    samples: int
    metrics: JsonObject
    level: float = Field(description="probability inside the ellipses")
    points: list[ErrorPointOut] = Field(description="at most 2000, evenly taken")


class EmbeddingPointOut(AnswerModel):
    """A sequence in the plane."""

    x: float
    y: float
    label: str
    predicted: str = Field(description="a class, or a cluster, which has no name but its number")


class RunEmbeddingOut(AnswerModel):
    """Embeddings of labelled sequences in the newest evaluation, along the two principal axes."""

    job_id: str
    dataset_id: str
    scores: JsonObject
    explained: list[float] = Field(description="share of the variance along x and along y")
    points: list[EmbeddingPointOut] = Field(description="at most 2000, evenly taken")


class WorstPictureOut(AnswerModel):
    """A part of an image that was held out from training."""

    caption: str = Field(description="the image, and how its objects compare")
    picture: str = Field(description="JPEG as base64: with the true outlines, and beside it with those predicted")


class RunWorstOut(AnswerModel):
    """Where a trained segmentation network does worst."""

    note: str
    pictures: list[WorstPictureOut] = Field(description="the worst first")
