import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from brim.sequences.model import BiLstm
from brim.sequences.model.lstm import _ScaleGrad, _UnscaleGrad

MODES = ("gate", "gather")


def packed(reference: nn.LSTM, x: Tensor, length: Tensor) -> Tensor:
    rows = pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(reference(rows)[0], batch_first=True, total_length=x.shape[1])[0]


def pair(inputs: int, hidden: int, layers: int, mode: str) -> tuple[BiLstm, nn.LSTM]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours = BiLstm(inputs, hidden, layers, reverse=mode)
    reference = nn.LSTM(inputs, hidden, layers, bidirectional=True, batch_first=True)
    reference.load_state_dict(ours.state_dict())
    return ours, reference


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("inputs", "hidden", "layers"), [(24, 16, 2), (1, 3, 1)])
def test_states_equal_those_of_packed_sequences(mode, inputs, hidden, layers):
    ours, reference = pair(inputs, hidden, layers, mode)
    length = torch.tensor([40, 1, 2, 17, 39, 40, 8])
    x = torch.randn(len(length), 40, inputs)

    found = ours(x, length)

    assert (found - packed(reference, x, length)).abs().max() < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_those_of_packed_sequences(mode):
    ours, reference = pair(12, 16, 2, mode)
    length = torch.tensor([30, 1, 11, 29])
    x = torch.randn(4, 30, 12, requires_grad=True)
    weight = torch.randn(4, 30, 32)
    names = [name for name, _ in reference.named_parameters()]

    found = torch.autograd.grad((ours(x, length) * weight).sum(), [x, *(ours.get_parameter(name) for name in names)])

    expected = torch.autograd.grad((packed(reference, x, length) * weight).sum(), [x, *reference.parameters()])
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_dropout_acts_between_layers_in_training_only():
    torch.manual_seed(0)
    ours = BiLstm(4, 8, 2, dropout=0.5)
    x, length = torch.randn(2, 6, 4), torch.tensor([6, 3])

    assert not torch.equal(ours(x, length), ours(x, length))
    assert torch.equal(ours.eval()(x, length), ours(x, length))


def test_gradients_too_small_for_fp16_survive_the_lift():
    x = torch.randn(64, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    scale = torch.ones(())
    states = _UnscaleGrad.apply(x, scale).half() @ _UnscaleGrad.apply(weight, scale).half()
    sent = 1e-9 * torch.randn(64, 8)  # fp16 ends at 6e-8

    _ScaleGrad.apply(states, scale, torch.bfloat16).backward(sent.bfloat16())

    assert (x.grad - sent @ weight.T).abs().max() < 0.02 * x.grad.abs().max()
    assert (weight.grad - x.T @ sent).abs().max() < 0.02 * weight.grad.abs().max()
