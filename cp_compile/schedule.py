"""The order of a backward's kernels: weight gradients run while an exchange is on its way.

    dO = ...; start exchange(dO); wait; attention's backward; ...; dW = mm(...)
    dO = ...; start exchange(dO); dW = mm(...); wait; attention's backward; ...

Nothing waits for the gradient of a weight, so it can run anywhere behind what it is made of. Inductor calls this with
its scheduled kernels, last of all: see ``torch._inductor.config.reorder_for_compute_comm_overlap_passes``. The idea is
that of zero-bubble schedules (arXiv:2401.10241), for the exchanges of sequences.
"""

from __future__ import annotations

from typing import Any

from cp_compile._compat import contains_collective, contains_wait, is_matrix_product

__all__ = ["hide_exchanges"]


def hide_exchanges(kernels: list[Any]) -> list[Any]:
    """The same kernels, with a weight gradient between each exchange and its wait, as far as there are any.

    The one that could be computed last is taken: what it reads is held for the shortest time.

    Args:
        kernels: inductor's scheduler nodes, in order.
    """
    order = list(kernels)
    gradients = [kernel for kernel in order if _is_weight_gradient(kernel)]
    for exchange in [kernel for kernel in order if contains_collective(kernel)]:
        start = order.index(exchange)
        end = next((i for i in range(start, len(order)) if _waits_for(order[i], exchange)), start)
        if any(gradient in order[start:end] for gradient in gradients):
            gradients = [gradient for gradient in gradients if gradient not in order[start:end]]
            continue
        made = {name: i for i, kernel in enumerate(order) for name in kernel.get_buffer_names()}
        # From behind, so that the first that needs a buffer stays.
        needed = {d.name: i for i in reversed(range(len(order))) for d in order[i].unmet_dependencies}
        ready = {gradient: _ready(gradient, made) for gradient in gradients}
        able = [g for g in gradients if ready[g] < start < min(needed.get(n, end) for n in g.get_buffer_names())]
        if end > start and able:
            chosen = max(able, key=ready.__getitem__)
            gradients.remove(chosen)
            order.remove(chosen)
            order.insert(order.index(exchange) + 1, chosen)
    return order


def _is_weight_gradient(kernel: Any) -> bool:
    """Whether it is a matrix product whose result leaves the graph, and that nothing else reads."""
    users = [user.node for buffer in kernel.get_outputs() for user in buffer.users]
    return is_matrix_product(kernel) and bool(users) and all(user.get_name() == "OUTPUT" for user in users)


def _waits_for(kernel: Any, exchange: Any) -> bool:
    return contains_wait(kernel) and any(d.name in exchange.get_buffer_names() for d in kernel.unmet_dependencies)


def _ready(kernel: Any, made: dict[str, int]) -> int:
    """The place behind which all that a kernel reads is there; -1: from the start."""
    return max((made[d.name] for d in kernel.unmet_dependencies if d.name in made), default=-1)
