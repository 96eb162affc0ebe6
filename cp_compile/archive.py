"""Saved programs: a ``.pt2`` archive of ``torch.export`` with the weights, and a manifest beside it.

The archive holds the graph of one rank, in which a name stands for the group: the program of any process that has a
group of as many ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import TreeSpec, treespec_dumps, treespec_loads
from torch.utils.checkpoint import CheckpointPolicy

from cp_compile._compat import save_exported
from cp_compile.errors import CPError, RefusedError
from cp_compile.export import GROUP
from cp_compile.graphs import copy_of, for_group
from cp_compile.inline import use_attention_kernels
from cp_compile.options import Options
from cp_compile.passes import Output
from cp_compile.passes.custom_function import CUSTOM_FUNCTION
from cp_compile.passes.layouts import Size, shape_of
from cp_compile.program import CPProgram, Signature
from cp_compile.rank_module import RankModule, group_of_size

__all__ = ["load", "save"]

FORMAT = 1
"""Of the manifest; a program that was saved under another one is not read."""
_OPTIONS = ("compiler", "outputs", "check", "check_timeout")


def save(program: CPProgram, path: str | PathLike[str]) -> None:
    """Writes ``path`` and its manifest; see ``CPProgram.save``."""
    _refuse_what_is_lost(program)
    signature = program.signature
    archived, constants = _archived(program.graph_module)
    tensors = {**signature.state, **constants, **signature.unused}
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    aliases = {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    inputs = [_describe(node) for node in archived.graph.find_nodes(op="placeholder")]
    save_exported(archived, kept, path)
    manifest = {
        "format": FORMAT,
        "cp_size": program.cp_size,
        "mesh_dim": GROUP,
        "arguments": list(signature.arguments),
        "inputs": inputs,
        "unused": list(signature.unused),
        "aliases": aliases,
        "transient": [*signature.transient, *constants],
        "training": signature.training,
        "recompute": _recompute(program.graph_module),
        "ranges": signature.ranges,
        "conditions": list(signature.conditions),
        "in_spec": treespec_dumps(signature.in_spec),
        "out_spec": treespec_dumps(signature.out_spec),
        "outputs": [{**asdict(output), "size": str(output.size)} for output in program.outputs],
        "options": {name: getattr(program.options, name) for name in _OPTIONS},
        "draws": program.draws,
        "versions": _versions(),
    }
    manifest_of(path).write_text(json.dumps(manifest, indent=1) + "\n")


def load(path: str | PathLike[str], mesh: Any = None) -> RankModule:
    """The module of a program that ``CPProgram.save`` wrote, on the ranks of ``mesh``; see ``CPProgram.module``.

    Args:
        path: of the archive; its manifest lies beside it.
        mesh: as the option of the backend; ``None``: the ``cp`` dimension of the current mesh, else the world.

    Raises:
        CPError: there is no manifest, it is of another format, or the mesh has another number of ranks.
    """
    manifest = _manifest(path)
    group = group_of_size(mesh, manifest["cp_size"], f"the program in {path} was saved")
    exported = torch.export.load(path)
    module = for_group(exported.graph_module, group.name)
    for node, entry in zip(module.graph.find_nodes(op="placeholder"), manifest["inputs"], strict=True):
        node.meta.update(cp_input=entry["name"], **{f"cp_{entry['kind']}": True})
        node.meta.setdefault("val", entry.get("value"))
    for node in module.graph.nodes:
        if node.name in manifest["recompute"]:
            policy, region = manifest["recompute"][node.name]
            node.meta.update(recompute=CheckpointPolicy(policy), ac_graph_id=region)
    tensors = exported.state_dict
    tensors.update({name: tensors[first] for name, first in manifest["aliases"].items()})
    signature = Signature(
        arguments=tuple(manifest["arguments"]),
        in_spec=_spec(manifest["in_spec"]),
        out_spec=_spec(manifest["out_spec"]),
        state={entry["name"]: tensors[entry["name"]] for entry in manifest["inputs"] if entry["kind"] == "state"},
        ranges={name: (low, high) for name, (low, high) in manifest["ranges"].items()},
        conditions=tuple(manifest["conditions"]),
        unused={name: tensors[name] for name in manifest["unused"]},
        transient=tuple(manifest["transient"]),
        training=manifest["training"],
    )
    outputs = [Output(**{**entry, "size": _size(entry["size"])}) for entry in manifest["outputs"]]
    return RankModule(module, outputs, signature, group, Options.parse(manifest["options"]))


def manifest_of(path: str | PathLike[str]) -> Path:
    """Where the manifest of an archive lies."""
    return Path(path).with_suffix(".json")


def _manifest(path: str | PathLike[str]) -> dict[str, Any]:
    place = manifest_of(path)
    try:
        manifest: dict[str, Any] = json.loads(place.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CPError(
            f"{place} is no manifest of a saved program ({error})\n"
            "  remedy: keep the two files that CPProgram.save writes together"
        ) from None
    if manifest.get("format") != FORMAT:
        written = manifest.get("versions", {}).get("cp_compile", "an unknown version")
        raise CPError(
            f"{place} has the format {manifest.get('format')}, written by cp_compile {written}; this version reads "
            f"{FORMAT}\n  remedy: export and save the model again"
        )
    return manifest


def _refuse_what_is_lost(program: CPProgram) -> None:
    """What ``torch.export`` would inline or leave out of an archive."""
    if program.options.stop_after is not None:
        raise RefusedError(
            f"the rewrite ended behind the pass {program.options.stop_after!r}: there is no program to save",
            "export it without stop_after",
        )
    for node in program.graph_module.graph.nodes:
        if node.target is CUSTOM_FUNCTION:
            raise RefusedError.at(
                node,
                "a custom autograd.Function cannot be saved: torch.export inlines it, and its backward would be lost",
                "write it in plain torch ops, or compile the model where it runs",
            )
        if node.target is use_attention_kernels:
            raise RefusedError.at(
                node, "sdpa_kernel cannot be saved: an archive holds ops alone", "leave it out of the forward"
            )


def _archived(module: GraphModule) -> tuple[GraphModule, dict[str, torch.Tensor]]:
    """A copy of a graph with what an archive holds of each node, and its constants, which are inputs there."""
    copy = copy_of(module)
    constants = _lift_constants(copy)
    for node in copy.graph.nodes:
        kept = {key: node.meta[key] for key in _KEPT if key in node.meta}
        stack = node.meta.get("nn_module_stack", {})
        kept["nn_module_stack"] = {key: (path, _type_name(kind)) for key, (path, kind) in stack.items()}
        node.meta = kept
    return copy, constants


_KEPT = ("val", "stack_trace", "cp_input", "cp_argument", "cp_state", "cp_seed", "cp_rank")


def _lift_constants(module: GraphModule) -> dict[str, torch.Tensor]:
    """Makes the constants of a graph its inputs, behind the state."""
    constants: dict[str, torch.Tensor] = {}
    inputs = module.graph.find_nodes(op="placeholder")
    ours = next(node for node in inputs if node.meta.get("cp_seed") or node.meta.get("cp_rank"))
    fake_mode = ours.meta["val"].fake_mode
    lifted: dict[str, Node] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        value = getattr(module, name)
        if not isinstance(value, torch.Tensor):
            continue
        if name not in lifted:
            constants[name] = value
            with module.graph.inserting_before(ours):
                lifted[name] = module.graph.placeholder(name)
            lifted[name].meta.update(val=fake_mode.from_tensor(value, static_shapes=True), cp_input=name, cp_state=True)
        node.replace_all_uses_with(lifted[name])
        module.graph.erase_node(node)
    module.recompile()
    return constants


def _recompute(module: GraphModule) -> dict[str, tuple[int, int]]:
    """The policy and the region of each node in a checkpoint, which an archive has no place for."""
    tagged = [node for node in module.graph.nodes if "recompute" in node.meta]
    return {node.name: (node.meta["recompute"].value, node.meta["ac_graph_id"]) for node in tagged}


def _type_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _describe(node: Node) -> dict[str, Any]:
    """An input: its name, its kind, and its sizes or, where it is no tensor, its value."""
    kind = next(kind for kind in ("argument", "state", "seed", "rank") if node.meta.get(f"cp_{kind}"))
    entry = {"name": str(node.meta["cp_input"]), "kind": kind}
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        return {**entry, "value": value}
    sizes = [str(size) for size in shape_of(value)]
    return {**entry, "sizes": sizes, "dtype": str(value.dtype).removeprefix("torch.")}


def _size(text: str) -> Size:
    return int(text) if text.isdigit() else sympy.sympify(text)


def _spec(text: str) -> TreeSpec:
    try:
        return treespec_loads(text)
    except Exception as error:
        raise CPError(
            f"the program takes or returns a type that is not known here ({error})\n"
            "  remedy: import the module that defines it (of transformers: the model's) before load"
        ) from None


def _versions() -> dict[str, str]:
    return {"cp_compile": version("cp_compile"), "torch": torch.__version__}
