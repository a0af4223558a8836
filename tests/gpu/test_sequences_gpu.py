"""Sequences on a GPU: the LSTM against packed sequences, half precision, captured steps without a wait, clusters."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from brim.engine.config import TrainConfig
from brim.engine.device.devices import stream
from brim.engine.training.source import BatchSource
from brim.engine.training.trainer import train
from brim.sequences.batches.augmentation import augment
from brim.sequences.config import Augmentation, SequenceConfig
from brim.sequences.evaluation.scores import cluster_scores
from brim.sequences.model.lstm import BiLstm
from brim.sequences.model.network import Classifier, Encoder, frame_mask
from brim.sequences.training.kmeans import kmeans
from brim.sequences.training.objectives import classification_loss

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

CUDA = torch.device("cuda:0")
WAYS = [("gate", False), ("gather", False), ("gather", True)]
LENGTHS = torch.tensor([120, 1, 2, 77, 119, 120, 33, 64] * 4)


@contextmanager
def exact() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def pair(hidden: int, reverse: str, concurrent: bool) -> tuple[BiLstm, nn.LSTM]:
    torch.manual_seed(0)
    ours = BiLstm(96, hidden, 2, reverse=reverse, concurrent=concurrent)
    reference = nn.LSTM(96, hidden, 2, bidirectional=True, batch_first=True)
    reference.load_state_dict(ours.state_dict())
    return ours.to(CUDA), reference.to(CUDA)


def packed(reference: nn.LSTM, x: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, LENGTHS, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(reference(rows)[0], batch_first=True, total_length=x.shape[1])[0]


def source_frames(dim: int = 96) -> Tensor:
    frames = torch.randn(len(LENGTHS), 120, dim, generator=stream(0, "x", device=CUDA), device=CUDA)
    return frames * frame_mask(LENGTHS.to(CUDA), 120).unsqueeze(-1)


@pytest.mark.parametrize("hidden", [16, 128, 192, 256])  # every kernel cuDNN chooses from
@pytest.mark.parametrize(("reverse", "concurrent"), WAYS)
def test_states_and_gradients_equal_those_of_packed_sequences(hidden, reverse, concurrent):
    ours, reference = pair(hidden, reverse, concurrent)
    x = source_frames().requires_grad_()
    weight = torch.randn(len(LENGTHS), 120, 2 * hidden, device=CUDA)

    with exact():
        found, expected = ours(x, LENGTHS.to(CUDA)), packed(reference, x)
        ours_grad, their_grad = (torch.autograd.grad((states * weight).sum(), x)[0] for states in (found, expected))

    assert (found - expected).abs().max() < 1e-5
    assert (ours_grad - their_grad).abs().max() < 1e-4 * their_grad.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("reverse", "concurrent"), WAYS)
def test_half_precision_is_close_and_padding_stays_exactly_without_influence(dtype, reverse, concurrent):
    ours, reference = pair(128, reverse, concurrent)
    x = source_frames()
    other = torch.where(frame_mask(LENGTHS.to(CUDA), 120).unsqueeze(-1), x, 30.0)

    with torch.autocast("cuda", dtype):
        found, same = ours(x, LENGTHS.to(CUDA)), ours(other, LENGTHS.to(CUDA))

    assert found.dtype == dtype
    assert torch.equal(found, same)
    assert (found.float() - packed(reference, x)).abs().max() < 0.02


@pytest.mark.parametrize(("reverse", "concurrent"), WAYS)
def test_gradients_that_fp16_could_not_hold_survive_under_bf16(reverse, concurrent):
    ours, reference = pair(128, reverse, concurrent)
    x, tiny = source_frames(), 1e-9
    weight = torch.randn(len(LENGTHS), 120, 256, device=CUDA)

    with torch.autocast("cuda", torch.bfloat16):
        states = ours(x, LENGTHS.to(CUDA))
    (states.float() * weight * tiny).sum().backward()
    (packed(reference, x) * weight).sum().backward()

    for name, parameter in reference.named_parameters():
        found, expected = ours.get_parameter(name).grad / tiny, parameter.grad
        assert (found - expected).norm() < 0.03 * expected.norm(), name


class Ramps(BatchSource):
    """Rising and falling sequences in two lengths of batches, on the device."""

    tier = "vram"

    def __init__(self, num_items: int = 512, batch_size: int = 64, dim: int = 24) -> None:
        self.num_items, self.batch_size, self.num_batches = num_items, batch_size, num_items // batch_size
        rng = stream(0, "ramps", device=CUDA)
        self.length = torch.randint(8, 65, (num_items,), generator=rng, device=CUDA)
        self.label = torch.arange(num_items, device=CUDA) % 2
        slope = (2 * self.label - 1)[:, None, None] * torch.arange(64, device=CUDA)[:, None] / 64
        noise = 0.1 * torch.randn(num_items, 64, dim, generator=rng, device=CUDA)
        self.frames = ((slope + noise) * frame_mask(self.length, 64).unsqueeze(-1)).half()

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[dict[str, Tensor]]:
        order = torch.randperm(self.num_items, generator=stream(1, number, device=CUDA), device=CUDA)
        for index, part in enumerate(order.split(self.batch_size)):
            num_frames = 64 if index % 2 else 48
            if index >= start_batch:
                length = self.length[part].clamp(max=num_frames)
                yield {"frames": self.frames[part, :num_frames], "length": length, "label": self.label[part]}


def shaped(**changes: object) -> SequenceConfig:
    return SequenceConfig(**{"dim": 24, "channels": 64, "hidden": 64, "embedding": 64} | changes)


def disturb(batch: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
    frames = batch["frames"].clone()
    return batch | {"frames": frames, "length": augment(frames, batch["length"], rng, Augmentation())}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(("reverse", "concurrent"), WAYS)
def test_classes_are_learnt_in_captured_steps(tmp_path, precision, reverse, concurrent):
    torch.manual_seed(0)
    source = Ramps()
    module = Classifier(Encoder(shaped(reverse=reverse, concurrent=concurrent)), 2).to(CUDA)
    config = TrainConfig(epochs=8, precision=precision, tensorboard=False)

    report = train(
        module, classification_loss, source, config=config, out=tmp_path, device="cuda", transform=disturb
    )  # fmt: skip

    assert report.step_kind == "graph"
    with torch.no_grad():
        right = module.eval()(source.frames, source.length).argmax(1) == source.label
    assert right.float().mean() > 0.95


def test_clusters_are_found_and_the_same_every_time():
    rng = stream(0, "blobs", device=CUDA)
    truth = torch.arange(200_000, device=CUDA) % 10
    points = 4 * torch.randn(10, 64, generator=rng, device=CUDA)[truth]
    points += torch.randn(points.shape, generator=rng, device=CUDA)

    one, two = (kmeans(points, 10, seed=1) for _ in range(2))

    assert cluster_scores(one.labels, truth)["ari"] > 0.99
    assert torch.equal(one.labels, two.labels)
    assert torch.equal(one.centres, two.centres)
