"""Peers that do not hold the same batch, length or weights get an error that says what differs."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from cp_compile.peers import tensor_digest
from tests.models import batch, model
from tests.ranks import Ranks

EAGER = {"compiler": "eager"}


def message_of(function, *args) -> str:  # type: ignore[no-untyped-def]
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mismatch(kind: str) -> tuple[str, float, float]:
    rank = dist.get_rank()
    lm = model(layers=1)
    if kind == "weights" and rank == 1:
        with torch.no_grad():
            lm.blocks[0].up.weight[0, 0] += 1e-9
    compiled = torch.compile(lm, backend="cp_ulysses", options={**EAGER, "check_timeout": 30.0}, dynamic=False)
    ids, labels = batch(16 if kind == "length" and rank == 1 else 13)
    if kind == "batch" and rank == 1:
        ids = ids.flip(0)
    message = message_of(compiled, ids, labels)
    # The process goes on: the next step, with what agrees, is right.
    torch._dynamo.reset()
    lm = model(layers=1)
    ids, labels = batch(13)
    right = lm(ids, labels)[0].item()
    loss = torch.compile(lm, backend="cp_ulysses", options=EAGER)(ids, labels)[0].item()
    return message, loss, right


def test_what_differs_is_named(two_ranks: Ranks) -> None:
    for kind, pattern in {
        "batch": "input 'ids' ((2, 13) torch.int64) holds other values",
        "length": "input 'ids' is (2, 13) torch.int64 on one and (2, 16) torch.int64 on the other",
        "weights": "input 'blocks.0.up.weight' ((64, 32) torch.float64) holds other values",
    }.items():
        for message, loss, right in two_ranks.run(mismatch, kind):
            assert message.startswith("PeerMismatchError: ranks 0 and 1")
            assert pattern in message
            assert "data-parallel rank" in message
            assert abs(loss - right) < 1e-10


def always() -> tuple[str, str]:
    rank = dist.get_rank()
    lm = model(layers=1)
    ids, labels = batch(13)
    other = ids.flip(0) if rank == 1 else ids
    compiled = torch.compile(lm, backend="cp_ulysses", options={**EAGER, "check": "always"})
    first = message_of(compiled, ids, labels)
    return first, message_of(compiled, other, labels)


def test_a_later_batch_is_compared_under_always(two_ranks: Ranks) -> None:
    for first, second in two_ranks.run(always):
        assert first == "no error"
        assert "input 'ids' ((2, 13) torch.int64) holds other values" in second


def only_one_compiles() -> tuple[str, float]:
    start = time.monotonic()
    message = ""
    # A group of its own: the comparison that rank 1 never makes must not be found by a later test.
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        lm = model(layers=1)
        compiled = torch.compile(lm, backend="cp_ulysses", options={**EAGER, "mesh": group, "check_timeout": 1.0})
        message = message_of(compiled, *batch(13))
    dist.barrier()
    return message, time.monotonic() - start


def test_a_rank_that_waits_alone_raises_in_time(two_ranks: Ranks) -> None:
    (message, seconds), _ = two_ranks.run(only_one_compiles)
    assert "rank 0 compiled the model, and rank(s) 1" in message
    assert "did not within 1 s" in message
    assert "check_timeout" in message
    assert seconds < 60


def one_refuses() -> str:
    """Rank 1's model has an op without a rule: rank 0 is told why, instead of waiting."""
    lm = model(layers=1)
    rank = dist.get_rank()

    def run(ids: torch.Tensor) -> torch.Tensor:
        logits = lm.logits(ids)
        return logits.median() if rank == 1 else logits.sum()

    group = dist.new_group([0, 1])
    return message_of(torch.compile(run, backend="cp_ulysses", options={**EAGER, "mesh": group}), batch(13)[0])


def test_a_refusal_on_one_rank_reaches_the_others(two_ranks: Ranks) -> None:
    waiting, refusing = two_ranks.run(one_refuses)
    assert "aten.median.default" in refusing
    assert waiting.startswith("PeerMismatchError: rank 1 of the context-parallel group refused the model: aten.median")


def constants() -> str:
    """The ranks' programs differ in a constant alone."""
    lm = model(layers=1)
    values = [1.0, 2.0] if dist.get_rank() == 0 else [2.0, 1.0]
    group = dist.new_group([0, 1])
    run = lambda ids: (lm.logits(ids).mean(1)[:, :2] * torch.tensor(values, dtype=torch.float64)).sum()
    return message_of(torch.compile(run, backend="cp_ulysses", options={**EAGER, "mesh": group}), batch(13)[0])


def test_a_constant_that_differs_is_seen(two_ranks: Ranks) -> None:
    for message in two_ranks.run(constants):
        assert message.startswith("PeerMismatchError: ranks 0 and 1"), message
        assert "their graphs differ" in message


def test_a_digest_sees_values_places_shapes_and_dtypes() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    digest = tensor_digest(tensor)
    swapped = tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    nudged = tensor.clone()
    nudged[2, 3] = torch.nextafter(nudged[2, 3], torch.tensor(20.0))
    others = [swapped, nudged, tensor.reshape(4, 3), tensor.double(), tensor.bfloat16()]
    assert tensor_digest(tensor.clone()) == digest
    assert len({digest, *map(tensor_digest, others)}) == 6
    for value in (torch.tensor(True), torch.zeros(0), torch.zeros(2, dtype=torch.complex64), tensor.t()):
        assert tensor_digest(value) == tensor_digest(value.clone())
