"""What only real ranks show: dropout in training, counts that change, an optimiser's step, losses outside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import cp_compile
from cp_compile.verify import relative_error
from tests.exact.lm import DIM, LM, Layer, seeded, tokens, uneven
from tests.ranks import Ranks, mean_over_ranks

AOT = {"compiler": "aot_eager"}


def compiled(module: Any, **options: Any) -> Any:
    return torch.compile(module, backend="cp_ulysses", options={**AOT, **options}, dynamic=False)


def over_a_count(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def assert_mean_gradients(module: nn.Module, plain: nn.Module, limit: float = 1e-8) -> None:
    """Every parameter's gradient, averaged over the ranks, is the plain model's."""
    for (name, parameter), right in zip(module.named_parameters(), plain.parameters(), strict=True):
        error = relative_error(mean_over_ranks(parameter.grad), right.grad)
        assert error <= limit, f"{name}: {error}"


# -- counts of the caller -------------------------------------------------------------------------------------------


def accumulated(as_tensor: bool) -> None:
    """Two micro-batches of 12 and 5 tokens under one count of 17, then the same again under 10 and 20."""
    lm = seeded(lambda: LM(loss=over_a_count, logits=False))
    plain, step = copy.deepcopy(lm), torch.compile(lm, backend="cp_ulysses", options=AOT)
    for counts in ((17, 17), (10, 20)):
        lm.zero_grad()
        plain.zero_grad()
        for valid, seed, count in zip((12, 5), (1, 2), counts):
            ids = tokens(16, 1, seed)
            labels = torch.where(torch.arange(16) < 16 - valid, -100, ids)
            n: Any = torch.tensor(count) if as_tensor else count
            plain(ids, labels, n).backward()
            step(ids, labels, n).backward()
        assert_mean_gradients(lm, plain)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_a_count_over_micro_batches(two_ranks: Ranks, as_tensor: bool) -> None:
    two_ranks.run(accumulated, as_tensor)


# -- a step ---------------------------------------------------------------------------------------------------------


def sgd_step() -> None:
    lm = seeded(lambda: LM(logits=False))
    plain, inputs = copy.deepcopy(lm), [tokens(), uneven(tokens())]
    plain(*inputs).backward()
    compiled(lm)(*inputs).backward()
    cp_compile.average_gradients(lm)
    for module in (lm, plain):
        torch.optim.SGD(module.parameters(), lr=1.0).step()
    for parameter, right in zip(lm.parameters(), plain.parameters(), strict=True):
        assert relative_error(parameter.detach(), right.detach()) <= 1e-9


def test_a_step_of_sgd(two_ranks: Ranks) -> None:
    two_ranks.run(sgd_step)


def scaled_step() -> None:
    """float16 under autocast, with a loss scale that overflows once: every rank skips that step."""
    lm = seeded(lambda: LM(logits=False, positions=None), torch.float32)
    plain, inputs = copy.deepcopy(lm), [tokens(), uneven(tokens())]
    step, optimiser = compiled(lm), torch.optim.SGD(lm.parameters(), lr=0.1)
    taken = []
    for scale in (2.0**60, 2.0**8):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        optimiser.zero_grad()
        before = lm.h.weight.detach().clone()
        with torch.autocast("cpu", torch.float16):
            loss = step(*inputs)
        scaler.scale(loss).backward()
        cp_compile.average_gradients(lm)
        scaler.step(optimiser)
        taken.append(not torch.equal(before, lm.h.weight))
    assert taken == [False, True]
    optimiser = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(*inputs).backward()
    optimiser.step()
    for parameter, right in zip(lm.parameters(), plain.parameters(), strict=True):
        assert relative_error(parameter.detach(), right.detach()) <= 1e-2


def test_a_scaled_step_in_float16(two_ranks: Ranks) -> None:
    two_ranks.run(scaled_step)


# -- random draws ---------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout of hidden states, in attention, and of a value that every rank holds whole; a block is checkpointed."""

    def __init__(self, p: float, kept: bool) -> None:
        super().__init__()
        self.lm, self.p, self.kept = LM(attend=self.attend), p, kept
        self.table = nn.Parameter(torch.ones(40, DIM))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p)

    def forward(self, ids: Tensor) -> Any:
        x = F.dropout(self.lm.e(ids), self.p) + F.dropout(self.table, self.p)[: ids.shape[1]]
        block = lambda x: F.dropout(self.lm.b[0](x, None), self.p)
        x = block(x) if self.kept else checkpoint(block, x, use_reentrant=False)
        mask = F.dropout(torch.ones_like(x), self.p)
        return self.lm.h(x).square().mean(), mask, F.dropout(torch.ones(64, dtype=x.dtype), self.p)


def dropping(p: float, compiler: str, alike: bool) -> Any:
    """Loss, mask of a slice, mask of a whole value and gradients of two steps, without and with checkpointing."""
    rank = dist.get_rank()
    results = []
    for kept in (False,) if compiler == "inductor" else (True, False):
        torch._dynamo.reset()
        module = seeded(lambda kept=kept: Dropping(p, kept))
        step = compiled(module, outputs="local", compiler=compiler, inductor={"cpp.simdlen": 1})
        torch.manual_seed(5 if alike else 5 + rank)
        for _ in range(2):
            module.zero_grad()
            loss, mask, whole = step(tokens(26, 4))
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in module.named_parameters() if "lm.f" not in name}
            results.append((loss.item(), mask, whole, gradients))
    return results


@pytest.mark.parametrize(
    ("compiler", "alike"), [("eager", True), ("aot_eager", True), ("aot_eager", False), ("inductor", True)]
)
def test_dropout(two_ranks: Ranks, compiler: str, alike: bool) -> None:
    """Whether the ranks were seeded alike or not."""
    first, second = two_ranks.run(dropping, 0.25, compiler, alike)
    for mine, other in zip(first, second):
        assert mine[0] == other[0]  # the loss is one value
        assert torch.equal(mine[2], other[2])  # a whole draw is one draw
        rates = [(mask == 0).double().mean().item() for mask in (mine[1], other[1])]
        assert all(abs(rate - 0.25) < 0.04 for rate in rates)  # 1664 elements each: 4 standard deviations
        assert not torch.equal(mine[1], other[1])  # slices share no pattern
    for step in range(len(first) - 2):
        # Recomputed regions repeat what they drew: with and without checkpointing, the same gradients.
        for ranks in (first, second):
            for name, gradient in ranks[step][3].items():
                assert relative_error(ranks[2 + step][3][name], gradient) <= 1e-9, name
    assert first[0][0] != first[1][0]  # each step draws anew


def no_dropout() -> None:
    module = seeded(lambda: Dropping(0.0, True))
    loss, mask, _ = compiled(module)(tokens())
    plain = copy.deepcopy(module)
    right, _, _ = plain(tokens())
    assert relative_error(loss.detach(), right.detach()) <= 1e-12
    assert bool((mask.full_tensor() == 1).all())


def test_a_probability_of_zero_is_exact(two_ranks: Ranks) -> None:
    two_ranks.run(no_dropout)


# -- parameters without a gradient ----------------------------------------------------------------------------------


def unused() -> None:
    from tests.exact.test_parameters import Unused

    for compiler in ("eager", "aot_eager"):
        torch._dynamo.reset()
        module = seeded(Unused)
        plain, inputs = copy.deepcopy(module), [tokens(), tokens(seed=2)]
        plain(*inputs)[0].backward()
        compiled(module, compiler=compiler)(*inputs)[0].backward()
        none = {name for name, parameter in module.named_parameters() if parameter.grad is None}
        assert none == {"idle.weight", "idle.bias"}
        for (name, parameter), right in zip(module.named_parameters(), plain.parameters(), strict=True):
            if name not in none:
                assert relative_error(mean_over_ranks(parameter.grad), right.grad) <= 1e-8, name


def test_parameters_without_a_gradient_keep_none(two_ranks: Ranks) -> None:
    two_ranks.run(unused)


# -- many kinds of mixing at once -----------------------------------------------------------------------------------


class Mixing(nn.Module):
    """A convolution, attention by hand, a token shift, max pooling and a pick, in one model."""

    def __init__(self) -> None:
        super().__init__()
        from tests.exact.test_attention import by_hand
        from tests.exact.test_mixing import Conv, Of, token_shift

        self.lm = LM(layers=2, mix=Conv)
        self.lm.b[1].attend = by_hand
        self.lm.b[1].mix = Of(token_shift)

    def forward(self, ids: Tensor, labels: Tensor, last: Tensor) -> Tensor:
        h = self.lm.hidden(ids)
        loss = F.cross_entropy(self.lm.h(h).flatten(0, 1), labels.flatten())
        return loss + h.amax(1).square().mean() + h[torch.arange(h.shape[0]), last].exp().mean()


def mixing() -> None:
    module = seeded(Mixing)
    plain = copy.deepcopy(module)
    inputs = tokens(), uneven(tokens(), 6), torch.tensor([12, 1])
    step = compiled(module, compiler="inductor", inductor={"cpp.simdlen": 1})
    right, loss = plain(*inputs), step(*inputs)
    assert relative_error(loss.detach(), right.detach()) <= 1e-10
    right.backward()
    loss.backward()
    assert_mean_gradients(module, plain)


def test_many_kinds_of_mixing(two_ranks: Ranks) -> None:
    two_ranks.run(mixing)


def test_many_kinds_of_mixing_at_a_symbolic_length() -> None:
    inputs = tokens(), uneven(tokens(), 6), torch.tensor([12, 1])
    for tensor in inputs[:2]:
        torch._dynamo.mark_dynamic(tensor, 1)
    report = cp_compile.verify(seeded(Mixing), inputs, cp_size=4)
    assert report.ok, report


# -- custom functions -----------------------------------------------------------------------------------------------


def custom_function(compiler: str) -> None:
    from tests.exact.test_functions import FUNCTIONS, Of

    for name in ("norm", "clipped", "checkpointed", "a quantised weight"):
        torch._dynamo.reset()
        lm = seeded(lambda name=name: LM(mix=lambda: Of(FUNCTIONS[name]), logits=False))
        plain, inputs = copy.deepcopy(lm), [tokens(), uneven(tokens())]
        plain(*inputs).backward()
        compiled(lm, compiler=compiler)(*inputs).backward()
        assert_mean_gradients(lm, plain)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_custom_functions(two_ranks: Ranks, compiler: str) -> None:
    two_ranks.run(custom_function, compiler)


# -- dtypes that a backend cannot send ------------------------------------------------------------------------------

DTYPES: dict[str, Any] = {
    "bool, exchanged": lambda h: (h > 0).flip(1) * h,
    "int16, exchanged": lambda h: (h * 3).to(torch.int16).flip(1) * h,
    "bool, picked": lambda h: (h > 0)[:, -1] * h[:, 0],
    "bool, gathered": lambda h: (h > 0.1).any(1) * (h > 0).int().amax(1) * h[:, 0],
    "complex, exchanged": lambda h: torch.view_as_real(
        torch.view_as_complex(h.unflatten(-1, (-1, 2)))[:, 1:] * torch.view_as_complex(h.unflatten(-1, (-1, 2)))[:, :-1]
    ),
    "bfloat16, softmax": lambda h: h.bfloat16().softmax(1) * h,
    "float16, largest": lambda h: h.half().max() * h,
}


def sent() -> None:
    lm = seeded(LM)
    for name, function in DTYPES.items():
        torch._dynamo.reset()
        pooled = lambda ids, function=function: function(lm.hidden(ids)).square().sum()
        loss, right = compiled(pooled)(tokens()), pooled(tokens())
        limit = 1e-3 if "float" in name else 1e-12
        assert relative_error(loss.detach(), right.detach()) <= limit, name
        loss.backward()


def test_every_dtype_is_sent(two_ranks: Ranks) -> None:
    two_ranks.run(sent)


# -- kernels of attention -------------------------------------------------------------------------------------------


def with_a_kernel() -> list[str]:
    """The names of what ran, in the second call."""
    lm = LM().double()

    def step(ids: Tensor) -> Tensor:
        x = lm.e(ids)
        with sdpa_kernel([SDPBackend.MATH], set_priority=True):
            x = lm.b[0](x, None)
        return lm.h(x).sum()

    run = compiled(step, compiler="eager")
    run(tokens())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(tokens())
    assert torch._C._get_flash_sdp_enabled(), "the kernels of what comes after are those of before"
    return [event.name for event in profile.events() if "_scaled_dot_product" in event.name]


def test_the_kernels_that_a_context_chooses(two_ranks: Ranks) -> None:
    for names in two_ranks.run(with_a_kernel):
        assert set(names) == {"aten::_scaled_dot_product_attention_math"}


# -- a loss outside of the graph ------------------------------------------------------------------------------------


def from_a_shard() -> tuple[float, float, float]:
    """``reduction="sum"`` over the global count is right; torch's own mean is a mean of the shards' means."""
    lm = seeded(lambda: LM(logits=False))
    plain, ids = copy.deepcopy(lm), tokens(16)
    labels = F.pad(uneven(ids)[:, 1:], (0, 1), value=-100)
    logits_of = lambda module: lambda ids: module.h(module.hidden(ids))
    right = F.cross_entropy(logits_of(plain)(ids).flatten(0, 1), labels.flatten())
    right.backward()
    logits = compiled(logits_of(lm))(ids)
    targets = cp_compile.shard(labels, 1)
    total = F.cross_entropy(logits.transpose(1, 2), targets, reduction="sum").full_tensor()
    loss = total / (labels != -100).sum()
    loss.backward()
    assert_mean_gradients(lm, plain)
    mean_of_means = F.cross_entropy(logits.detach().transpose(1, 2), targets).full_tensor()
    return loss.item(), right.item(), mean_of_means.item()


def test_a_loss_of_a_returned_shard(two_ranks: Ranks) -> None:
    for loss, right, mean_of_means in two_ranks.run(from_a_shard):
        assert abs(loss - right) <= 1e-12
        assert abs(mean_of_means - right) > 1e-3


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    whole = torch.arange(2 * 13).view(2, 13)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for given in (None, mesh):
        for dim in (1, -1):
            tensor = cp_compile.shard(whole, dim, given)
            assert tensor.shape == (2, 13)
            assert tensor.to_local().tolist() == whole[:, dist.get_rank() * 7 :][:, :7].tolist()
            assert torch.equal(tensor.full_tensor(), whole)
    short = cp_compile.shard(whole[:1], 0, mesh)
    assert short.to_local().shape == (1 - dist.get_rank(), 13)
    with pytest.raises(cp_compile.OptionError, match="dim 2 is out of range for a tensor of 2 dims"):
        cp_compile.shard(whole, 2, mesh)
    with pytest.raises(cp_compile.RefusedError, match=r"(?s)requires grad.*remedy: detach it"):
        cp_compile.shard(torch.ones(2, 13, requires_grad=True), 1, mesh)


def test_shard(two_ranks: Ranks) -> None:
    two_ranks.run(sharded)
