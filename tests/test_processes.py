"""Real processes: on every rank the loss, the logits and every parameter's mean gradient of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import Config, batch, model
from tests.ranks import Ranks, compare_with_plain

LENGTHS = (13, 16, 3, 1)
SHAPES = {
    "mha": Config(),
    "gqa 4:2": Config(layers=1, kv_heads=2),
    "mqa": Config(layers=1, kv_heads=1),
    "tied, layer norm": Config(layers=1, tied=True, norm="layer", loss="slice"),
    "not causal": Config(layers=1, causal=False, loss="pad"),
    "checkpointed": Config(checkpointed=2),
}


def job(config: Config, lengths: tuple[int, ...], keywords: dict[str, Any]) -> list[float]:
    return compare_with_plain(model(config), [batch(length) for length in lengths], **keywords)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", SHAPES)
def test_two_ranks(two_ranks: Ranks, name: str, compiler: str) -> None:
    lengths = {"eager": LENGTHS, "aot_eager": (16, 1)}[compiler] if name == "mha" else (13,)
    two_ranks.run(job, SHAPES[name], lengths, {"options": {"compiler": compiler}, "dynamic": False})


@pytest.mark.parametrize("gqa", ["flag", "repeat"])
def test_a_group_cut_by_the_query_heads(two_ranks: Ranks, gqa: str) -> None:
    """6 query heads on 3 kv heads: each rank's 3 query heads use two kv heads, one of them shared."""
    two_ranks.run(job, Config(layers=1, heads=6, kv_heads=3, gqa=gqa), (13,), {"options": {"compiler": "aot_eager"}})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "compiler"),
    [(4, 4, LENGTHS, "eager"), (4, 1, (13,), "aot_eager"), (8, 2, (16,), "aot_eager")],
)
def test_four_ranks(four_ranks: Ranks, heads: int, kv_heads: int, lengths: tuple[int, ...], compiler: str) -> None:
    config = Config(layers=1, heads=heads, kv_heads=kv_heads, width=4)
    four_ranks.run(job, config, lengths, {"options": {"compiler": compiler}, "dynamic": False})


@pytest.mark.parametrize(("dynamic", "compiler"), [(None, "eager"), (True, "eager"), (False, "aot_eager")])
def test_three_lengths_in_a_row(two_ranks: Ranks, dynamic: bool | None, compiler: str) -> None:
    keywords = {"options": {"compiler": compiler}, "dynamic": dynamic}
    two_ranks.run(job, Config(layers=1, kv_heads=2, loss="slice"), (13, 16, 9), keywords)


def test_inductor(two_ranks: Ranks) -> None:
    config = Config(layers=1, heads=6, kv_heads=3, checkpointed=1, tied=True)
    two_ranks.run(job, config, (13,), {"dynamic": False})


def symbolic_job() -> list[float]:
    batches = [batch(length) for length in (13, 16)]
    for tensor in batches[0]:
        torch._dynamo.mark_dynamic(tensor, 1)
    # Without vector code, which g++ takes longest for; the other test has it.
    options = {"inductor": {"cpp.simdlen": 1}}
    return compare_with_plain(model(Config(layers=1, kv_heads=2, loss="pad")), batches, options=options)


def test_inductor_with_a_symbolic_length(two_ranks: Ranks) -> None:
    two_ranks.run(symbolic_job)


def collectives_of_a_step() -> list[str]:
    lm = model(Config(layers=1, checkpointed=1))
    compiled = torch.compile(lm, backend="cp_ulysses", options={"compiler": "aot_eager"}, dynamic=False)
    compiled(*batch(13))[0].backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        compiled(*batch(13))[0].backward()
    names = [event.name.removeprefix("_c10d_functional::") for event in profile.events() if "_c10d_fun" in event.name]
    return sorted(name for name in names if name != "wait_tensor")


def test_a_checkpointed_layer_repeats_no_exchange(two_ranks: Ranks) -> None:
    """What ran, counted by the profiler: 2 all-to-alls forward and 2 backward, and the loss's sum both ways."""
    for names in two_ranks.run(collectives_of_a_step):
        assert names == ["all_reduce"] * 2 + ["all_to_all_single"] * 4


def test_autocast(two_ranks: Ranks) -> None:
    """bf16: the ranks round like the plain model does, so they agree to bf16's precision and keep float32 gradients."""
    config = Config(layers=1, amplify=1.0, dtype=torch.float32)
    keywords = {"options": {"compiler": "aot_eager"}, "autocast": True, "tolerance": 3e-2}
    two_ranks.run(job, config, (13,), keywords)
