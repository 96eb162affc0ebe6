"""Bad input: an error that names the user's line or switch and the remedy, on every rank; the process goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.models import LM, batch, model
from tests.ranks import Ranks

AOT = {"compiler": "aot_eager"}
Thing = Callable[[LM, torch.Tensor, torch.Tensor], Any]


def printing(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = lm.blocks[0](lm.embed(ids))
    print(end="")
    return lm.head(lm.blocks[1](x)).sum()


def item_in_a_condition(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = lm.blocks[0](lm.embed(ids))
    if x.mean().item() > 100:
        x = x + 1
    return lm.head(lm.blocks[1](x)).sum()


def tensor_in_a_condition(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = lm.blocks[0](lm.embed(ids))
    if x.mean() > 100:
        x = x + 1
    return lm.head(lm.blocks[1](x)).sum()


@torch._dynamo.disable
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def disabled(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return lm.head(lm.blocks[1](hidden(lm.blocks[0](lm.embed(ids))))).sum()


def no_rule(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return lm.head(torch.kthvalue(lm.blocks[0](lm.embed(ids)), 1, 1)[0]).sum()


def normalised_over_it(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = lm.blocks[0](lm.embed(ids))
    return F.layer_norm(x, x.shape[1:]).sum()


def no_attention(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return lm.head(lm.embed(ids)).sum()


def attention_of_a_parameter(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    q = lm.head.weight[None, None]
    return F.scaled_dot_product_attention(q, q, q).sum() + lm.embed(ids).sum()


def several_sequences(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return lm.blocks[0](lm.embed(ids)).sum() + lm.blocks[1](lm.embed(labels.abs() % 7)).sum()


def shuffled(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (lm.blocks[0](lm.embed(ids)) * torch.randperm(ids.shape[1])[:, None]).sum()


def randomly_leaky(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.rrelu(lm.blocks[0](lm.embed(ids)), training=True).sum()


def flex(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    with torch.no_grad():
        q = lm.embed(ids).view(*ids.shape, 4, 8).transpose(1, 2)
        return flex_attention(q, q, q).sum() + lm.blocks[0](lm.embed(ids)).sum()


HERE = r"at \S*test_refusals\.py:\d+ \("
# The function, and what its error says, in this order.
REFUSED: dict[str, tuple[Thing, list[str]]] = {
    "print": (printing, ["does not trace as one graph", HERE + r"print\(end", "remedy: take the construct out"]),
    "item": (item_in_a_condition, ["does not trace as one graph", HERE + r"if x\.mean\(\)\.item\(\)", "remedy"]),
    "condition": (tensor_in_a_condition, ["does not trace as one graph", HERE + r"if x\.mean\(\) > 100", "remedy"]),
    "disable": (disabled, ["does not trace as one graph", HERE + "return lm.head", "remedy"]),
    "no rule": (
        no_rule,
        [r"aten\.kthvalue\.default has no rule", HERE + r"return lm\.head\(torch\.kthvalue", "fallback"],
    ),
    "norm": (normalised_over_it, [r"aten\.layer_norm\.default mixes the positions of the sequence", HERE, "fallback"]),
    "no attention": (no_attention, ["nothing to share among the ranks", "remedy"]),
    "nothing sharded": (attention_of_a_parameter, ["nothing becomes sharded", HERE, "pass the token ids"]),
    "several": (several_sequences, [r"several inputs hold sequences of their own: ids \(dim 1\), labels", "sequence"]),
    "randperm": (shuffled, ["aten.randperm.default takes random numbers", HERE, "remedy"]),
    "rrelu": (randomly_leaky, ["takes random numbers", HERE, "remedy"]),
    "flex_attention": (flex, ["higher-order op flex_attention has no rule", HERE, "plain torch ops"]),
}


def refusal_of(thing: Thing, options: dict[str, Any] | None = None, keywords: dict[str, Any] | None = None) -> Any:
    """The error's text, the collectives that ran until then, and the loss of a right model afterwards."""
    lm = model()
    function = lambda ids, labels: thing(lm, ids, labels)
    compiled = torch.compile(function, backend="cp_ulysses", options={**AOT, **(options or {})}, **(keywords or {}))
    message = "no error"
    profile = None
    try:
        # Not a dispatch mode: Dynamo would not compile under one.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(*batch(13))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    collectives = [event.name for event in profile.events() if "all_to_all" in event.name or "all_reduce" in event.name]
    torch._dynamo.reset()
    lm, inputs = model(layers=1, gqa="repeat"), batch(3)
    loss = torch.compile(lm, backend="cp_ulysses", options={"compiler": "eager"}, dynamic=False)(*inputs)[0].item()
    return message, collectives, loss - lm(*inputs)[0].item()


def assert_says(message: str, parts: list[str]) -> None:
    assert re.search("(?s)" + ".*".join(parts), message), message


@pytest.mark.parametrize("name", REFUSED)
def test_refused_on_every_rank_before_any_collective(two_ranks: Ranks, name: str) -> None:
    thing, parts = REFUSED[name]
    results = two_ranks.run(refusal_of, thing)
    assert results[0][0] == results[1][0]
    for message, collectives, later in results:
        assert_says(message, parts)
        assert not collectives
        assert abs(later) < 1e-10


def plain(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return lm(ids, labels)[0]


def heads(count: int, mixed: bool) -> str:
    first, second = (model(heads=n, kv_heads=n, layers=1, width=4) for n in (4 if mixed else count, count))
    projection = torch.nn.Linear(first.embed.weight.shape[1], second.embed.weight.shape[1]).double()

    def run(ids: torch.Tensor) -> torch.Tensor:
        return second.blocks[0](projection(first.blocks[0](first.embed(ids)))).sum()

    try:
        torch.compile(run, backend="cp_ulysses", options=AOT)(batch(8)[0])
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("mixed", [False, True])
def test_heads_that_do_not_divide(four_ranks: Ranks, mixed: bool) -> None:
    for message in four_ranks.run(heads, 6, mixed):
        assert_says(
            message, ["6 query heads and 6 kv heads cannot be shared by cp = 4 ranks", r"models\.py:\d+", "remedy"]
        )
        assert "in module" in message


def mesh_of_two_dims() -> Any:
    return refusal_of(plain, {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))})


def unknown_option() -> Any:
    return refusal_of(plain, {"meshes": 1})


def wrong_value() -> Any:
    return refusal_of(plain, {"outputs": "whole"})


def no_mesh() -> Any:
    return refusal_of(plain, {"mesh": 2})


@pytest.mark.parametrize(
    ("job", "parts"),
    [
        (mesh_of_two_dims, ["option 'mesh' has 2 dimensions", "dp", r'pass mesh\["cp"\]']),
        (unknown_option, ["unknown option 'meshes'", "known options: mesh, compiler, inductor, outputs"]),
        (wrong_value, ["option 'outputs' is 'whole'; it takes one of 'shard', 'local', 'gathered'"]),
        (no_mesh, ["option 'mesh' is a int; it takes a 1-D DeviceMesh or a ProcessGroup"]),
    ],
)
def test_options(two_ranks: Ranks, job: Callable[[], Any], parts: list[str]) -> None:
    for message, collectives, later in two_ranks.run(job):
        assert_says(message, parts)
        assert not collectives
        assert abs(later) < 1e-10


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    compiled = torch.compile(model(layers=1), backend="cp_ulysses", options=AOT)
    with pytest.raises(Exception, match=r"(?s)found no process group.*init_process_group"):
        compiled(*batch(4))


def near_the_limit() -> list[str]:
    lm = model(layers=1)
    compiled = torch.compile(lm, backend="cp_ulysses", options={"compiler": "eager"}, dynamic=False)
    messages = []
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (4, 5, 6, 7):
            try:
                compiled(*batch(length))
                messages.append("")
            except Exception as error:
                messages.append(str(error))
    return messages


def test_the_last_compile_raises(two_ranks: Ranks) -> None:
    """The one after it would silently run the plain model."""
    for messages in two_ranks.run(near_the_limit):
        assert messages[:2] == ["", ""]
        for message in messages[2:]:
            assert_says(message, ["recompile_limit permits 3", "dynamic=True"])


def layers_one_by_one() -> str:
    lm = model()
    layers = [torch.compile(block, backend="cp_ulysses", options=AOT) for block in lm.blocks]
    try:
        layers[1](layers[0](lm.embed(batch(8)[0])))
    except Exception as error:
        return str(error)
    return "no error"


def shard_as_argument() -> str:
    lm = model(layers=1)
    logits = torch.compile(lm.logits, backend="cp_ulysses", options=AOT)(batch(8)[0])
    try:
        torch.compile(lambda x: (x * 2).sum(), backend="cp_ulysses", options=AOT)(logits)
    except Exception as error:
        return str(error)
    return "no error"


def test_a_shard_as_an_argument(two_ranks: Ranks) -> None:
    for message in two_ranks.run(shard_as_argument):
        assert_says(message, ["an argument of the compiled function is a DTensor", "compile the whole model at once"])


def test_layers_compiled_one_by_one(two_ranks: Ranks) -> None:
    """The second layer is handed the first one's shard, which torch refuses to mix with plain weights."""
    for message in two_ranks.run(layers_one_by_one):
        assert_says(message, ["mixed torch.Tensor and DTensor", r"models\.py"])


def updated_buffer(sharded: bool) -> str:
    lm = model(layers=1)
    lm.register_buffer("seen", torch.zeros(8, dtype=torch.float64))

    def run(ids: torch.Tensor) -> torch.Tensor:
        x = lm.blocks[0](lm.embed(ids))
        lm.seen.copy_(x.detach()[0, :, 0] if sharded else lm.seen + x.detach().mean())
        return lm.head(x).sum()

    try:
        torch.compile(run, backend="cp_ulysses", options=AOT)(batch(8)[0])
    except Exception as error:
        return str(error)
    right = lm.blocks[0](lm.embed(batch(8)[0])).mean()
    assert torch.allclose(lm.seen, right.expand(8)), "the buffer is not the plain model's"
    return "no error"


def test_a_buffer_that_differs_by_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(updated_buffer, False) == ["no error"] * 2
    for message in two_ranks.run(updated_buffer, True):
        assert_says(message, ["is updated with a value that is cut", "remedy"])


def test_a_checkpoint_with_a_policy_is_refused(two_ranks: Ranks) -> None:
    for message, _, _ in two_ranks.run(refusal_of, with_a_policy):
        assert_says(message, ["torch.utils.checkpoint with context_fn", HERE, "remedy"])


def with_a_policy(lm: LM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    from functools import partial

    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    return checkpoint(lm.blocks[0], lm.embed(ids), use_reentrant=False, context_fn=context).sum()
