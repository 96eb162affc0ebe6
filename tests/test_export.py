"""export: the program of the backend, without a process group; run on ranks, saved and loaded."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel

import cp_compile
from cp_compile import CPError, CPProgram, OptionError, RefusedError
from cp_compile.backend import build_program
from cp_compile.demo_model import Llama
from cp_compile.options import Options
from cp_compile.verify import relative_error
from tests.models import Config, batch, model
from tests.ranks import RankError, Ranks, mean_over_ranks, whole

ROW = torch.export.Dim("length", min=3, max=64)


class Counted(nn.Module):
    """A language model with a buffer that each call writes, a flag, and results of every kind."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.lm = model(config or Config(kv_heads=2, loss="slice"))
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, ids: Tensor, labels: Tensor, double: bool = False) -> dict[str, Any]:
        self.calls.add_(1)
        loss, logits = self.lm(ids, labels)
        return {"loss": 2 * loss if double else loss, "logits": logits, "calls": self.calls.sum(), "rows": ids.shape[0]}


class Square(torch.autograd.Function):
    """Twice the gradient that it should have, so that a backward of torch's own shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 4 * x * gradient


class Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = model(Config(layers=1))

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        _, logits = self.lm(ids, labels)
        logits = Square.apply(logits)
        return logits.mean(), logits


def described(module: GraphModule) -> list[str]:
    """Each op with what it gives, its layout and its move, names and symbols left out."""
    lines, numbers = [], {}
    for node in module.graph.nodes:
        if node.op == "call_function":
            value = node.meta.get("val")
            shape = [str(size) for size in value.shape] if isinstance(value, Tensor) else ""
            text = f"{node.target} {shape} {node.meta.get('cp_layout', '')} {node.meta.get('cp_moved', '')}"
            symbol = lambda found: numbers.setdefault(found[0], f"size{len(numbers)}")
            lines.append(re.sub(r"\bs\d+\b", symbol, text))
    return lines


def compiled(module: nn.Module, args: tuple[Any, ...], cp_size: int) -> GraphModule:
    """What the backend compiles for the same model."""
    found: list[GraphModule] = []

    def backend(graph_module: GraphModule, inputs: Any) -> Any:
        found.append(build_program(graph_module, inputs, cp_size, "cp", Options()).module)
        return graph_module.forward

    torch.compile(module, backend=backend)(*args)
    return found[-1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: model(Config(kv_heads=2, loss="slice")),
        lambda: model(Config(kv_heads=1, gqa="repeat", tied=True, norm="layer", loss="pad")),
        lambda: model(Config(checkpointed=2)),
        Squared,
        Counted,
    ],
    ids=["gqa", "repeated, tied", "checkpointed", "custom function", "buffer"],
)
@pytest.mark.parametrize(("cp_size", "length"), [(2, 13), (4, 16)])
def test_it_is_the_program_of_the_backend(make: Any, cp_size: int, length: int) -> None:
    lm, inputs = make(), batch(length)
    exported = cp_compile.export(lm, inputs, cp_size=cp_size).graph_module
    assert sorted(described(exported)) == sorted(described(compiled(lm, inputs, cp_size)))
    ops = [node.target for node in exported.graph.nodes if "_c10d" in str(node.target)]
    assert ops == [n.target for n in compiled(lm, inputs, cp_size).graph.nodes if "_c10d" in str(n.target)]


def test_the_same_with_a_symbolic_length() -> None:
    lm, inputs = model(Config(kv_heads=2, loss="slice")), batch(13)
    exported = cp_compile.export(lm, inputs, cp_size=2, dynamic_shapes=({1: ROW}, {1: ROW})).graph_module
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 1)
    ours = [line.split(" ")[0] for line in described(exported) if line.startswith("aten")]
    theirs = [line.split(" ")[0] for line in described(compiled(lm, inputs, 2)) if line.startswith("aten")]
    assert sorted(op for op in ours if "sym_size" not in op) == sorted(op for op in theirs if "sym_size" not in op)


def test_checkpoints_keep_their_tags() -> None:
    program = cp_compile.export(model(Config(checkpointed=1)), batch(13), cp_size=2)
    tagged = [node for node in program.graph_module.graph.nodes if "recompute" in node.meta]
    assert any("scaled_dot_product" in str(node.target) for node in tagged)


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    ids = batch(13)[0]
    program = cp_compile.export(model(), (ids, ids), cp_size=2)
    names = {node.meta["cp_input"]: node for node in program.graph_module.graph.find_nodes(op="placeholder")}
    assert names["labels"].users
    assert names["ids"].users


def test_eight_billion_parameters_on_the_meta_device() -> None:
    with torch.device("meta"):
        large = Llama(vocabulary=128_256, dim=8192, layers=8, heads=64, kv_heads=8).to(torch.bfloat16)
        ids = torch.zeros(1, 131_072, dtype=torch.int64)
    assert sum(parameter.numel() for parameter in large.parameters()) > 8e9
    program = cp_compile.export(large, [ids], cp_size=8)
    assert sum("all_to_all" in str(node.target) for node in program.graph_module.graph.nodes) == 32


# -- on ranks -------------------------------------------------------------------------------------------------------


def exported(dynamic: bool, compiler: str, **options: Any) -> tuple[Counted, CPProgram]:
    lm = Counted()
    shapes = {"ids": {1: ROW}, "labels": {1: ROW}, "double": None} if dynamic else None
    ids, labels = batch(13)
    program = cp_compile.export(
        lm, (ids, labels), {"double": False}, cp_size=2, dynamic_shapes=shapes, compiler=compiler, **options
    )
    return lm, program


def compare(module: nn.Module, plain: nn.Module, lengths: tuple[int, ...], limit: float) -> None:
    for length in lengths:
        ids, labels = batch(length)
        plain.zero_grad()
        module.zero_grad()
        right, mine = plain(ids, labels), module(ids, labels=labels, double=False)
        right["loss"].backward()
        mine["loss"].backward()
        assert relative_error(mine["loss"].detach(), right["loss"].detach()) <= limit
        assert relative_error(whole(mine["logits"]).detach(), right["logits"].detach()) <= limit
        assert mine["calls"] == right["calls"]
        assert mine["rows"] == right["rows"]
        gradients = dict(module.named_parameters())
        for name, parameter in plain.named_parameters():
            error = relative_error(mean_over_ranks(gradients[name].grad), parameter.grad)
            assert error <= limit, f"{name}: {error}"


def run(compiler: str, dynamic: bool, folder: str | None, limit: float = 1e-8) -> None:
    lm, program = exported(dynamic, compiler)
    plain = copy.deepcopy(lm)
    if folder is None:
        module = program.module()
        assert dict(module.named_parameters())["lm.embed.weight"] is lm.lm.embed.weight
    else:
        path = os.path.join(folder, f"{compiler}{dynamic}.pt2")
        if dist.get_rank() == 0:
            program.save(path)
        dist.barrier()
        module = cp_compile.load(path)
    compare(module, plain, (13, 16, 5) if dynamic else (13, 13), limit)


@pytest.mark.parametrize(
    ("saved", "compiler", "dynamic"),
    [
        (False, "eager", True),
        (False, "aot_eager", False),
        (False, "aot_eager", True),
        (True, "eager", False),
        (True, "aot_eager", True),
    ],
)
def test_on_two_ranks(two_ranks: Ranks, tmp_path: Path, saved: bool, compiler: str, dynamic: bool) -> None:
    two_ranks.run(run, compiler, dynamic, str(tmp_path) if saved else None)


def test_on_two_ranks_by_inductor(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(run, "inductor", False, str(tmp_path))


def run_on_a_mesh_of_another_name(folder: str) -> None:
    """The archive knows no group of this process: it runs over one that is made here."""
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    lm, program = exported(False, "eager")
    path = os.path.join(folder, "other.pt2")
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    compare(cp_compile.load(path, mesh["context"]), copy.deepcopy(lm), (13,), 1e-8)


def test_on_a_mesh_of_another_name(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(run_on_a_mesh_of_another_name, str(tmp_path))


def composed(kind: str) -> None:
    """Averaged by DDP or FSDP2 as the plain model would be, over two steps of an optimizer."""
    lm, program = exported(False, "aot_eager")
    plain, module = copy.deepcopy(lm), program.module()
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(module)
    else:
        wrapped = fully_shard(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapped, plain)]
    for seed in (1, 2):
        ids, labels = (torch.roll(x, seed, 1) for x in batch(13))
        for m, optimizer in zip((wrapped, plain), optimizers, strict=True):
            optimizer.zero_grad()
            m(ids, labels, False)["loss"].backward()
            optimizer.step()
    found = {name.removeprefix("module."): parameter for name, parameter in wrapped.named_parameters()}
    for name, right in plain.named_parameters():
        assert relative_error(whole(found[name]).detach(), right.detach()) <= 1e-8, name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_it_composes_with(two_ranks: Ranks, kind: str) -> None:
    two_ranks.run(composed, kind)


class Hidden(nn.Module):
    """Takes hidden states, which may require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(Config(layers=1))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.lm.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


def gradients_change(compiler: str) -> None:
    """Evaluated first, then trained; an input without, then with, a gradient; a part that thaws."""
    lm = Hidden()
    plain, x = (
        copy.deepcopy(lm),
        torch.randn(2, 13, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    lm.lm.blocks[0].up.requires_grad_(False)
    module = cp_compile.export(lm, (x,), cp_size=2, compiler=compiler).module()
    with torch.no_grad():
        module(x)
    module(x).backward()
    assert lm.lm.blocks[0].up.weight.grad is None
    lm.lm.blocks[0].up.requires_grad_(True)
    module.zero_grad()
    mine, right = (x.clone().requires_grad_() for _ in range(2))
    module(mine).backward()
    plain(right).backward()
    assert relative_error(mine.grad, right.grad) <= 1e-8
    found = dict(module.named_parameters())
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert relative_error(mean_over_ranks(found[name].grad), parameter.grad) <= 1e-8, name


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_what_requires_grad_may_change(two_ranks: Ranks, compiler: str) -> None:
    two_ranks.run(gradients_change, compiler)


class Spare(nn.Module):
    """Tied weights, a part that is not used, a buffer that does not persist, a constant, a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = model(Config(tied=True, checkpointed=1))
        self.spare = nn.Linear(2, 2, dtype=torch.float64)
        self.register_buffer("scale", torch.full((), 2.0, dtype=torch.float64), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.lm(ids, labels)[0] * self.scale + torch.tensor([1.0, 2.0]).sum()  # type: ignore[no-any-return]


def state_dicts(folder: str) -> None:
    lm, other = Spare(), Spare()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    program = cp_compile.export(lm, batch(13), cp_size=2, compiler="aot_eager")
    path = os.path.join(folder, "spare.pt2")
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    for module in (program.module(), cp_compile.load(path)):
        assert module.state_dict().keys() == lm.state_dict().keys()
        assert len(list(module.parameters())) == len(list(lm.parameters()))
        assert relative_error(module(*batch(13)).detach(), lm(*batch(13)).detach()) <= 1e-8
        module.load_state_dict(other.state_dict())
        assert relative_error(module(*batch(13)).detach(), other(*batch(13)).detach()) <= 1e-8
        tags = [node for node in module._cp_graph[0].graph.nodes if "recompute" in node.meta]
        assert any("scaled_dot_product" in str(node.target) for node in tags)
        lm = Spare()
        module.load_state_dict(lm.state_dict())


def test_a_state_dict_of_the_model_is_one_of_the_program(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(state_dicts, str(tmp_path))


def modes() -> None:
    module = cp_compile.export(model().eval(), batch(13), cp_size=2).module()
    assert not module.training
    assert module.eval() is module
    with pytest.raises(CPError, match=r"exported in eval mode, and cannot be put into train mode\n.*model.train\(\)"):
        module.train()


def test_the_mode_is_that_of_the_export(two_ranks: Ranks) -> None:
    two_ranks.run(modes)


def custom_function_runs() -> None:
    lm = Squared()
    plain = copy.deepcopy(lm)
    module = cp_compile.export(lm, batch(13), cp_size=2, compiler="eager").module()
    plain(*batch(13))[0].backward()
    module(*batch(13))[0].backward()
    found = dict(module.named_parameters())
    for name, right in plain.named_parameters():
        assert relative_error(mean_over_ranks(found[name].grad), right.grad) <= 1e-8, name


def test_a_custom_backward_is_kept(two_ranks: Ranks) -> None:
    two_ranks.run(custom_function_runs)


def meta_then_weights() -> None:
    lm = model()
    with torch.device("meta"):
        empty = model()
        inputs = tuple(torch.zeros_like(x, device="meta") for x in batch(13))
    module = cp_compile.export(empty, inputs, cp_size=2, compiler="aot_eager").module()
    with pytest.raises(CPError, match=r"no weights yet\n  remedy: module.to_empty"):
        module(*batch(13))
    module.load_state_dict(lm.state_dict(), assign=True)
    assert relative_error(module(*batch(13))[0].detach(), lm(*batch(13))[0].detach()) <= 1e-8


def test_weights_come_after_an_export_on_meta(two_ranks: Ranks) -> None:
    two_ranks.run(meta_then_weights)


# -- errors ---------------------------------------------------------------------------------------------------------


def other_rank_count(folder: str) -> None:
    program = cp_compile.export(model(), batch(13), cp_size=4)
    message = r"for 4 ranks, and the context-parallel group has 2\n  remedy: .* 4 ranks, or export .* cp_size=2"
    with pytest.raises(CPError, match=message):
        program.module()
    path = os.path.join(folder, "four.pt2")
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    with pytest.raises(CPError, match=message):
        cp_compile.load(path)


def test_another_number_of_ranks(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(other_rank_count, str(tmp_path))


def wrong_calls() -> None:
    _, program = exported(True, "eager")
    module, (ids, labels) = program.module(), batch(13)
    module(ids, labels, False)
    for args, message in (
        ((ids, labels), "misses 'double'"),
        ((ids, labels, True), "'double' is True, and the program was exported for False"),
        ((ids, labels, False, 1), "too many"),
        (
            (ids.float(), labels, False),
            r"'ids' is torch.float32 \[2, 13\], and .* for torch.int64 \[2, (s\d+)\], 3 <= \1 <= 64",
        ),
        ((ids[0], labels, False), r"'ids' is torch.int64 \[13\]"),
        ((ids[:1], labels[:1], False), r"'ids' is torch.int64 \[1, 13\]"),
        ((ids, labels[:, :-1], False), r"'labels' is torch.int64 \[2, 12\]"),
        ((*batch(2), False), r"'ids' is torch.int64 \[2, 2\]"),
        ((*batch(65), False), r"'ids' is torch.int64 \[2, 65\]"),
        (("ids", labels, False), "'ids' is a str, and the program takes a tensor"),
    ):
        with pytest.raises(CPError, match=message):
            module(*args)
    with pytest.raises(CPError, match="has 'mask' beside them"):
        module(ids, labels, False, mask=None)


def test_calls_that_do_not_fit(two_ranks: Ranks) -> None:
    two_ranks.run(wrong_calls)


def one_rank_calls_wrongly() -> None:
    _, program = exported(False, "eager", check_timeout=20.0)
    module = program.module()
    module(*batch(13 + 3 * dist.get_rank()), False)


def test_both_ranks_raise_where_one_call_does_not_fit(two_ranks: Ranks) -> None:
    with pytest.raises(RankError) as found:
        two_ranks.run(one_rank_calls_wrongly)
    assert "rank 1 of the context-parallel group refused the model: argument 'ids'" in str(found.value.errors[0])
    assert "argument 'ids' is torch.int64 [2, 16]" in str(found.value.errors[1])


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    class Kernel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model()

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return self.lm(ids, labels)

    with pytest.raises(RefusedError, match=r"autograd.Function cannot be saved[^$]*test_export.py:\d+"):
        cp_compile.export(Squared(), batch(13), cp_size=2).save(tmp_path / "x.pt2")
    with pytest.raises(RefusedError, match="sdpa_kernel cannot be saved"):
        cp_compile.export(Kernel(), batch(13), cp_size=2).save(tmp_path / "x.pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_manifest(tmp_path: Path) -> None:
    lm = Counted()
    shapes = {"ids": {1: ROW}, "labels": {1: ROW}}
    program = cp_compile.export(lm, batch(13), cp_size=2, dynamic_shapes=shapes)
    program.save(tmp_path / "lm.pt2")
    manifest = json.loads((tmp_path / "lm.json").read_text())
    assert (manifest["cp_size"], manifest["mesh_dim"], manifest["arguments"]) == (2, "cp", ["ids", "labels"])
    assert manifest["versions"]["torch"] == torch.__version__
    assert list(manifest["ranges"].values()) == [[3, 64]]
    sizes = {entry["name"]: entry.get("sizes") for entry in manifest["inputs"]}
    assert sizes["ids"] == sizes["labels"] == ["2", *manifest["ranges"]]
    assert sizes["lm.embed.weight"] == ["61", "32"]
    (tmp_path / "lm.json").write_text(json.dumps({**manifest, "format": 0}))
    with pytest.raises(CPError, match=r"has the format 0, written by cp_compile \S+; this version reads 1"):
        cp_compile.load(tmp_path / "lm.pt2")
    (tmp_path / "lm.json").unlink()
    with pytest.raises(CPError, match=r"lm.json is no manifest[^$]*keep the two files"):
        cp_compile.load(tmp_path / "lm.pt2")


class ByPosition(nn.Module):
    def forward(self, ids: Tensor, labels: Tensor, /) -> Tensor:
        return ids + labels


def test_an_unsuited_model_or_example() -> None:
    with pytest.raises(OptionError, match="export takes a module, and was given a function"):
        cp_compile.export(lambda ids: ids, [batch(13)[0]], cp_size=2)
    with pytest.raises(OptionError, match=r"does not fit .*forward: missing a required argument: 'labels'"):
        cp_compile.export(model(), batch(13)[:1], cp_size=2)
    with pytest.raises(OptionError, match="cp_size is 0"):
        cp_compile.export(model(), batch(13), cp_size=0)
    with pytest.raises(OptionError, match=r'by position only, .*: leave the "/" out'):
        cp_compile.export(ByPosition(), batch(13), cp_size=2)
    with pytest.raises(OptionError, match="unknown option 'falback'"):
        cp_compile.export(model(), batch(13), cp_size=2, falback="gather")


def test_what_does_not_trace_names_the_line() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model()

        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            loss, logits = self.lm(ids, labels)
            return loss if loss > 0 else logits  # the branch

    with pytest.raises(RefusedError, match=r"does not trace as one graph[^$]*test_export.py:\d+ .*the branch"):
        cp_compile.export(Branch(), batch(13), cp_size=2)
    with pytest.raises(RefusedError, match="heads"):
        cp_compile.export(model(Config(heads=6, kv_heads=6)), batch(13), cp_size=4)


def test_lengths_that_are_another_program() -> None:
    short = torch.export.Dim("length", min=1, max=64)
    with pytest.raises(RefusedError, match=r"allows lengths .* another program[^$]*length = Dim\('length', min=3"):
        cp_compile.export(Counted(), batch(13), cp_size=2, dynamic_shapes=({1: short}, {1: short}))
