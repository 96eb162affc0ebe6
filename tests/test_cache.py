"""The graph is the same on every rank: its hash, and what one rank compiles is a cache hit on the others."""

from __future__ import annotations

import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters

import cp_compile.backend as backend
from tests.models import batch, model
from tests.ranks import Ranks


def hashes() -> list[str]:
    found: list[str] = []
    original = backend.graph_hash

    def record(module: torch.fx.GraphModule) -> str:
        found.append(original(module))
        return found[-1]

    backend.graph_hash = record
    try:
        for symbolic in (False, True):
            torch._dynamo.reset()
            lm, inputs = model(layers=1, heads=6, kv_heads=3), batch(13)
            for tensor in inputs if symbolic else ():
                torch._dynamo.mark_dynamic(tensor, 1)
            torch.compile(lm, backend="cp_ulysses", options={"compiler": "eager"})(*inputs)
    finally:
        backend.graph_hash = original
    return found


def test_all_ranks_have_one_graph(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(hashes)
    assert first == second
    assert len(set(first)) == 2


def compile_in_turn(folder: str) -> dict[str, int]:
    """Rank 0 compiles into an empty cache while rank 1 waits; then rank 1 compiles, and both run."""
    rank = dist.get_rank()
    counters.clear()
    weight = torch.nn.Parameter(torch.randn(7, 8, generator=torch.Generator().manual_seed(0)))
    ids = torch.arange(5)[None] % 7

    def attend(ids: torch.Tensor) -> torch.Tensor:
        q = F.embedding(ids, weight).view(1, -1, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).square().sum()

    # The backward is otherwise compiled when it first runs, which takes both ranks.
    ahead = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder), ahead:
        original = backend.run_wrapper

        def after_compiling(*args, **kwargs):  # type: ignore[no-untyped-def]
            if rank == 0:
                dist.barrier()
            return original(*args, **kwargs)

        backend.run_wrapper = after_compiling
        try:
            if rank == 1:
                dist.barrier()
            options = {"inductor": {"cpp.simdlen": 1}}  # no vector code: g++ is done sooner
            torch.compile(attend, backend="cp_ulysses", options=options, dynamic=False)(ids).backward()
        finally:
            backend.run_wrapper = original
    found = dict(counters["aot_autograd"])
    found.update(counters["inductor"])
    return {key: found.get(key, 0) for key in ("autograd_cache_hit", "fxgraph_cache_hit", "fxgraph_cache_miss")}


def test_what_one_rank_compiles_is_a_hit_on_the_other(two_ranks: Ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = two_ranks.run(compile_in_turn, folder)
    assert first["fxgraph_cache_miss"] >= 1
    assert second["fxgraph_cache_miss"] == 0, second
    assert second["fxgraph_cache_hit"] + second["autograd_cache_hit"] >= 1, second
