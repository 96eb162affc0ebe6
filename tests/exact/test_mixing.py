"""Layers that mix positions (A16): exact by a rule, or refused by name and exact when gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import verify
from tests.exact.lm import DIM, LM, exact, seeded, tokens


class Conv(nn.Module):
    """A causal convolution along the sequence."""

    def __init__(self, groups: int = DIM, kernel: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv1d(DIM, DIM, kernel, padding=kernel - 1, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Gated(nn.Module):
    """A gated linear recurrence, by a scan in the log space."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.value = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        log = F.logsigmoid(self.decay(x) + 4).cumsum(1)
        return log.exp() * (self.value(x) * (-log).exp()).cumsum(1)


class Loop(nn.Module):
    """A recurrence written as a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.step(state) + x[:, t])
            states.append(state)
        return torch.stack(states, 1)


class Mixer(nn.Module):
    """A learned matrix over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(32, 32) / 4)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return self.matrix[:length, :length].tril() @ x


class Of(nn.Module):
    """A function as a module, beside its input, so that every gradient shows."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(x * self.scale)


def token_shift(x: Tensor) -> Tensor:
    return x - F.pad(x, (0, 0, 1, -1))


def shift_by_cat(x: Tensor) -> Tensor:
    previous = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)
    return torch.lerp(x, previous, 0.3)


def shift_by_assignment(x: Tensor) -> Tensor:
    shifted = torch.zeros_like(x)
    shifted[:, 1:] = x[:, :-1]
    return shifted * x


def halves(x: Tensor) -> Tensor:
    a, b = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
    return torch.cat((b, a), 1)


def pooled_by_two(x: Tensor) -> Tensor:
    x = F.pad(x, (0, 0, 0, x.shape[1] % 2))
    return x[:, ::2].repeat_interleave(2, 1)[:, :13] * x[:, :13]


def blocks(x: Tensor) -> Tensor:
    """Means of blocks of 4, the last of them padded."""
    padded = F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4))
    return padded.mean(2).repeat_interleave(4, 1)[:, : x.shape[1]]


def off_the_diagonal(x: Tensor) -> Tensor:
    x = x.clone()
    x.diagonal(0, 1, 2).zero_()
    return x


MIXES: dict[str, Any] = {
    "depthwise conv": Conv,
    "grouped conv": lambda: Conv(groups=8, kernel=3),
    "pointwise conv": lambda: Conv(groups=1, kernel=1),
    "scan": Gated,
    "loop": Loop,
    "mixer": Mixer,
    "cumsum": lambda: Of(lambda x: x.cumsum(1)),
    "running mean": lambda: Of(lambda x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]),
    "token shift": lambda: Of(token_shift),
    "token shift by cat": lambda: Of(shift_by_cat),
    "token shift by assignment": lambda: Of(shift_by_assignment),
    "centred": lambda: Of(lambda x: x - x.mean(1, keepdim=True)),
    "flip": lambda: Of(lambda x: x.flip(1)),
    "roll": lambda: Of(lambda x: x.roll(3, 1)),
    "sort": lambda: Of(lambda x: x.sort(1).values),
    "softmax over it": lambda: Of(lambda x: x.softmax(1)),
    "halves": lambda: Of(halves),
    "every second": lambda: Of(pooled_by_two),
    "cummax": lambda: Of(lambda x: x.cummax(1).values),
    "max over it": lambda: Of(lambda x: x.amax(1, keepdim=True) - x.max(1, keepdim=True).values * 0.5),
    "squeeze and excite": lambda: Of(lambda x: x * x.mean(1, keepdim=True).sigmoid()),
    "instance norm": lambda: Of(lambda x: (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True) + 1e-5).rsqrt()),
    "blocks": lambda: Of(blocks),
    "squeezed": lambda: Of(lambda x: x.squeeze() * 2 + x[..., :1].squeeze(-1)[..., None]),
    "against the first": lambda: Of(lambda x: x - x[:, :1] * x[:, -1:].expand_as(x)),
    "fft": lambda: Of(lambda x: torch.fft.fft(x, dim=1).real),
    "fft of both": lambda: Of(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real),
    "filter": lambda: Of(lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * 0.5, n=x.shape[1], dim=1)),
    "long convolution": lambda: Of(
        lambda x: torch.fft.irfft(
            torch.fft.rfft(x, n=64, dim=1) * torch.fft.rfft(torch.ones(64, 1), dim=0), n=64, dim=1
        )[:, : x.shape[1]]
    ),
    "interpolated": lambda: Of(lambda x: F.interpolate(x.mT, x.shape[1]).mT),
    # token-wise controls
    "einsum": lambda: Of(lambda x: torch.einsum("bsd,de->bse", x, torch.eye(DIM, dtype=x.dtype) * 2)),
    "split": lambda: Of(lambda x: torch.cat(x.split([2, DIM - 2], -1)[::-1], -1)),
    "chunk": lambda: Of(lambda x: torch.cat((x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1)),
    "group norm of rows": lambda: Of(lambda x: F.group_norm(x.reshape(-1, DIM), 4).view_as(x)),
    "windows": lambda: Of(lambda x: F.pad(x, (0, 0, 2, 0)).unfold(1, 3, 1).sum(-1)),
    "unfolded heads": lambda: Of(lambda x: x.view(*x.shape[:2], 4, 8).softmax(2).flatten(2)),
}


@pytest.mark.parametrize("name", MIXES)
def test_exact(name: str) -> None:
    exact(lambda: LM(mix=MIXES[name]), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("name", ["depthwise conv", "scan", "token shift"])
def test_on_two_ranks_and_short_sequences(name: str) -> None:
    exact(lambda: LM(mix=MIXES[name]), [tokens(16), tokens(16, seed=2)], cp_sizes=(2,))
    exact(lambda: LM(mix=MIXES[name]), [tokens(3), tokens(3, seed=2)])


def test_what_an_exchange_costs() -> None:
    """A scan is two exchanges and back, a token shift one and back, and nothing is gathered."""
    for name, count in {"cumsum": 2, "token shift": 2, "flip": 2}.items():
        (report,) = exact(lambda name=name: LM(mix=MIXES[name]), [tokens(16), tokens(16)])
        assert report.exchanges.forward == {"all_to_all_single": 2 + count, "all_reduce": 1}


class Recurrent(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.rnn = kind(DIM, DIM, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


# What is refused: how it is made, and the op that the refusal names.
REFUSED: dict[str, tuple[Any, str]] = {
    "full conv": (lambda: Conv(groups=1), "aten.conv1d.default"),
    "few groups": (lambda: Conv(groups=2), "aten.conv1d.default"),
    "diagonal": (lambda: Of(off_the_diagonal), "aten.diagonal"),
    "gru": (lambda: Recurrent(nn.GRU), "aten.gru.input"),
    "lstm": (lambda: Recurrent(nn.LSTM), "aten.lstm.input"),
    "norm over it": (lambda: Of(lambda x: F.layer_norm(x, x.shape[1:])), "aten.layer_norm.default"),
    "batch norm": (
        lambda: Of(lambda x: F.batch_norm(x.mT, None, None, training=True).mT), "aten._native_batch_norm_legit"),
    "median of all": (lambda: Of(lambda x: x.median()), "aten.median.default"),
    "kthvalue": (lambda: Of(lambda x: x.kthvalue(2, 1, True).values), "aten.kthvalue.default"),
    "pool": (lambda: Of(lambda x: F.avg_pool1d(x.mT, 3, 1, 1).mT), "aten.avg_pool2d.default"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_and_exact_when_gathered(name: str) -> None:
    make, op = REFUSED[name]
    module, inputs = seeded(lambda: LM(mix=make)), [tokens(), tokens(seed=2)]
    with torch._dynamo.config.patch(allow_rnn=True):
        with pytest.raises(Exception, match=rf"(?s){op}.*test_mixing\.py:\d+.*in module b\.0\.mix.*remedy"):
            verify(module, inputs, cp_size=4, dynamic=False)
        exact(module, inputs, fallback="gather")


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_a_recurrent_layer_on_slices_of_the_batch(kind: Any) -> None:
    with torch._dynamo.config.patch(allow_rnn=True):
        exact(lambda: LM(mix=lambda: Recurrent(kind)), [tokens(), tokens(seed=2)], cp_sizes=(2,))


def test_without_the_switch_a_recurrent_layer_is_refused() -> None:
    """As a part of the model, and as a module that a function calls."""
    gru = Recurrent(nn.GRU).double()
    for mix in (lambda: Recurrent(nn.GRU), lambda: Of(lambda x: gru(x))):
        module = seeded(lambda mix=mix: LM(mix=mix))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"does not trace as one graph(?s:.*)remedy: .*allow_rnn = True"):
            verify(module, [tokens(), tokens(seed=2)], cp_size=2)
