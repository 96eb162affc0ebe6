"""What users meet with these models: caches, hooks, dropout, two real ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import cp_compile
from benchmarks.zoo.batches import batch_of
from benchmarks.zoo.models import MODELS, Entry, build
from cp_compile.backend import build_program
from cp_compile.errors import RefusedError
from cp_compile.options import Options
from cp_compile.simulate import Simulation, simulated_group
from cp_compile.verify import relative_error
from tests.exact.lm import LM, seeded, tokens
from tests.ranks import Ranks, whole

LLAMA = MODELS["Llama"]


@pytest.mark.parametrize("name", ["Llama", "Llama, eager", "Bloom", "DeepSeek-V3, dense"])
def test_a_cache_among_the_outputs_is_refused(name: str) -> None:
    model = build(MODELS[name])
    arguments = {**batch_of(MODELS[name], model, "plain", 16), "use_cache": True}
    with pytest.raises(RefusedError, match=r"(?s)a cache for decoding.*at \S+\.py:\d+ \(.*use_cache=False"):
        cp_compile.verify(model, kwargs=arguments, cp_size=2)


def test_hidden_states_that_are_both_keys_and_values_are_no_cache() -> None:
    lm = seeded(lambda: LM(attend=lambda q, k, v, layer: F.scaled_dot_product_attention(q, k, k)))

    def call(ids: torch.Tensor) -> Any:
        x = lm.e(ids)
        heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads * 2, heads, heads), x

    report = cp_compile.verify(call, [tokens()], cp_size=2)
    assert report.ok, report


def test_hidden_states_need_hooks_that_are_installed_before() -> None:
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    model = build(LLAMA)
    arguments = {**batch_of(LLAMA, model, "plain", 13), "output_hidden_states": True}
    with pytest.raises(RefusedError, match=r"(?s)one graph.*remedy: call .*maybe_install_capturing_hooks\(model\)"):
        cp_compile.verify(model, kwargs=arguments, cp_size=2)
    torch._dynamo.reset()
    model = build(LLAMA)
    maybe_install_capturing_hooks(model)
    report = cp_compile.verify(model, kwargs=arguments, cp_size=2)
    assert report.ok, report
    assert sum("hidden_states" in row.name for row in report.rows) == 3


def printing(x: torch.Tensor) -> torch.Tensor:
    print(end="")
    return x + 1


def test_experts_one_by_one_are_refused() -> None:
    """Also where something else has broken a graph since the same was met before."""
    for _ in range(2):
        torch._dynamo.reset()
        torch.compile(printing, backend="eager")(torch.ones(2))
        model: Any = build(MODELS["Mixtral"])
        model.set_experts_implementation("eager")
        with pytest.raises(RefusedError, match=r'remedy: .*set_experts_implementation\("grouped_mm"\)'):
            cp_compile.verify(model, kwargs=batch_of(MODELS["Mixtral"], model, "plain", 16), cp_size=2)


def test_experts_by_batched_matmul() -> None:
    model: Any = build(MODELS["Mixtral"])
    model.set_experts_implementation("batched_mm")
    report = cp_compile.verify(model, kwargs=batch_of(MODELS["Mixtral"], model, "plain", 13), cp_size=4)
    assert max(row.error for row in report.rows) < 1e-6
    assert report.exchanges.forward == {"all_to_all_single": 4, "all_reduce": 1}


def test_verify_tells_float32_from_float64() -> None:
    """The norms of a float64 model run in float32: equal to that precision, and no better."""
    report = cp_compile.verify(build(LLAMA), kwargs=batch_of(LLAMA, build(LLAMA), "plain", 13), cp_size=2)
    assert report.ok, report
    assert {row.limit for row in report.rows} == {1e-4}


DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}
DRAWS = 24


def with_dropout(**probabilities: float) -> tuple[Any, dict[str, Any]]:
    """GPT-2 with its own dropout, and its batch."""
    still = MODELS["GPT-2"]
    entry = Entry("GPT-2 with dropout", "", still.config, {**still.settings, **probabilities}, ready=still.ready)
    model = build(entry)
    return model, batch_of(entry, model, "plain", 16)


def plain_logits(**probabilities: float) -> torch.Tensor:
    """Of as many draws of the plain model."""
    model, arguments = with_dropout(**probabilities)
    torch.manual_seed(0)
    with torch.no_grad():
        return torch.stack([model(**arguments).logits for _ in range(DRAWS)])


def simulated_logits(**probabilities: float) -> torch.Tensor:
    """Of as many seeds on two ranks."""
    model, arguments = with_dropout(**probabilities)
    found: list[torch.Tensor] = []

    def backend(graph_module: Any, inputs: Any) -> Any:
        program = build_program(graph_module, inputs, 2, group, Options())

        def run(*given: Any) -> Any:
            outputs = [Simulation(program.module, program.outputs, 2, seed=seed)(*given) for seed in range(DRAWS)]
            found.extend(values[1] for values in outputs)
            return outputs[-1]

        return run

    torch._dynamo.reset()
    with simulated_group(2) as group, torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(**arguments)
    return torch.stack(found)


def test_the_dropout_of_gpt2() -> None:
    """In embeddings, attention and residuals: logits of the same mean and spread. Each of the three can be told."""
    spread = lambda logits: logits.var(0).mean()
    plain, ranks = plain_logits(**DROPOUT), simulated_logits(**DROPOUT)
    assert ranks.flatten(1).unique(dim=0).shape[0] == DRAWS
    assert 0.93 < spread(ranks) / spread(plain) < 1.07
    # The mean of so many draws is off by its standard error, on both sides.
    off = (ranks.mean(0) - plain.mean(0)).square().mean()
    assert 0.8 < off / (2 * spread(plain) / DRAWS) < 1.25
    for name in DROPOUT:
        assert spread(plain_logits(**{**DROPOUT, name: 0.0})) / spread(plain) < 0.93, name


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


def on_two_ranks(name: str, batch: str, compiler: str, dtype: torch.dtype, limit: float) -> float:
    """A step through ``torch.compile`` on real ranks beside the plain model: loss, logits, averaged gradients."""
    entry = MODELS[name]
    model = build(entry).to(dtype)
    plain = copy.deepcopy(model)
    arguments = batch_of(entry, model, batch, 29)
    compiled = torch.compile(model, backend="cp_ulysses", options={"compiler": compiler}, dynamic=False)
    got, right = compiled(**arguments), plain(**arguments)
    got.loss.backward()
    right.loss.backward()
    cp_compile.average_gradients(model)
    errors = {"loss": relative_error(got.loss.detach(), right.loss.detach())}
    errors["logits"] = relative_error(whole(got.logits).detach(), right.logits.detach())
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    scale = sum(float(g.double().norm()) ** 2 for g in gradients.values()) ** 0.5
    for n, p in model.named_parameters():
        if n in gradients:
            errors[n] = relative_error(p.grad, gradients[n], scale)
    wrong = {n: error for n, error in errors.items() if not error <= limit}
    assert not wrong, wrong
    return max(errors.values())


@pytest.mark.parametrize(
    ("name", "batch", "compiler", "dtype", "limit"),
    [
        ("Llama", "plain", "aot_eager", torch.float64, 1e-6),
        ("Gemma-2", "right padding", "aot_eager", torch.float64, 1e-6),
        ("Mixtral, balance loss", "left padding", "aot_eager", torch.float32, 1e-4),
        ("Mixtral", "plain", "inductor", torch.float32, 1e-4),
        ("Mixtral", "plain", "aot_eager", torch.bfloat16, 6e-2),
    ],
)
def test_on_two_ranks(two_ranks: Ranks, name: str, batch: str, compiler: str, dtype: torch.dtype, limit: float) -> None:
    two_ranks.run(on_two_ranks, name, batch, compiler, dtype, limit)
