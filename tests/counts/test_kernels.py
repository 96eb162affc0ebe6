"""Kernels of a Llama-shaped block (GQA 4:1) in inductor's output code: layout copies, and what exchanges run under."""

from __future__ import annotations

import pytest
import torch

from cp_compile.demo_model import Llama
from tests.counts.kernels import Kernel, kernels

HEADS = {2: 8, 8: 16, 64: 64}  # query heads, of 32 channels
# Layout copies forward: out of the buffer that arrives. On the CPU, where inductor makes a kernel of its own of a
# concatenation (the halves of a rotary embedding), into the send buffer too; elsewhere what turns q and k writes it.
# Backward: of gradients into the send buffers, and that of v out of the one that arrives.
COPIES = {True: [1, 3], False: [2, 3]}


def of_llama(cp_size: int) -> tuple[list[Kernel], list[Kernel], int]:
    heads = HEADS[cp_size]
    model = Llama(dim=32 * heads, layers=1, heads=heads, kv_heads=heads // 4)
    rows = 64 if cp_size < 64 else 16
    forward, backward = kernels(model, torch.zeros(1, rows * cp_size, dtype=torch.int64), cp_size)
    return forward, backward, rows * 32 * heads


@pytest.mark.parametrize(("cp_size", "as_on_gpus"), [(2, True), (2, False), (8, True), (64, True)])
def test_layout_copies_exchanges_and_what_runs_under_them(cp_size: int, as_on_gpus: bool) -> None:
    with torch._inductor.config.patch(force_pointwise_cat=as_on_gpus):
        forward, backward, hidden = of_llama(cp_size)
    # Of the size of hidden states, or a part of them as large as k: the rest is of single rows and of the loss.
    copies = [[k for k in half if k.kind == "layout" and k.elements >= hidden // 8] for half in (forward, backward)]
    assert [len(half) for half in copies] == COPIES[as_on_gpus], copies
    sends = [kernel.kind for kernel in forward].index("exchange")
    writers = [kernel for kernel in forward[:sends] if "constant_pad_nd" in kernel.names]
    assert len(writers) == 1, writers
    for half in (forward, backward):
        assert sum(kernel.kind == "exchange" for kernel in half) == 2
    for i, kernel in enumerate(backward):
        if kernel.kind == "exchange":
            end = next(j for j in range(i, len(backward)) if backward[j].kind == "wait")
            assert "product" in [between.kind for between in backward[i:end]], "nothing runs under an exchange"
