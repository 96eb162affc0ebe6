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

from cp_compile._compat import save_exported
from cp_compile.errors import CPError, RefusedError
from cp_compile.export import GROUP, copy_of
from cp_compile.inline import use_attention_kernels
from cp_compile.options import Options
from cp_compile.passes import Output
from cp_compile.passes.custom_function import CUSTOM_FUNCTION
from cp_compile.passes.layouts import Size, shape_of
from cp_compile.program import CPProgram, Signature
from cp_compile.rank_module import RankModule, for_group, group_of_size

__all__ = ["load", "save"]

FORMAT = 1
"""Of the manifest; a program that was saved under another one is not read."""
_OPTIONS = ("compiler", "outputs", "check", "check_timeout")


def save(program: CPProgram, path: str | PathLike[str]) -> None:
    """Writes ``path`` and its manifest; see ``CPProgram.save``."""
    _refuse_what_is_lost(program)
    signature = program.signature
    save_exported(_archived(program.graph_module), signature.state, path)
    manifest = {
        "format": FORMAT,
        "cp_size": program.cp_size,
        "mesh_dim": GROUP,
        "arguments": list(signature.arguments),
        "inputs": [_describe(node) for node in program.graph_module.graph.find_nodes(op="placeholder")],
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
    module = for_group(exported.graph_module, group)
    for node, entry in zip(module.graph.find_nodes(op="placeholder"), manifest["inputs"], strict=True):
        node.meta.update(cp_input=entry["name"], **{f"cp_{entry['kind']}": True})
        node.meta.setdefault("val", entry.get("value"))
    signature = Signature(
        tuple(manifest["arguments"]),
        _spec(manifest["in_spec"]),
        _spec(manifest["out_spec"]),
        {entry["name"]: exported.state_dict[entry["name"]] for entry in manifest["inputs"] if entry["kind"] == "state"},
        {name: (low, high) for name, (low, high) in manifest["ranges"].items()},
        tuple(manifest["conditions"]),
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


def _archived(module: GraphModule) -> GraphModule:
    """A copy of a graph with what an archive holds of each node: its value, its line and its module."""
    copy = copy_of(module)
    for node in copy.graph.nodes:
        kept = {key: value for key, value in node.meta.items() if key in ("val", "stack_trace", "cp_state", "cp_input")}
        stack = node.meta.get("nn_module_stack", {})
        kept["nn_module_stack"] = {key: (path, _type_name(kind)) for key, (path, kind) in stack.items()}
        node.meta = kept
    return copy


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
