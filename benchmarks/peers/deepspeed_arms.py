"""The arms of DeepSpeed: AutoSP, and ALST's attention in a model of transformers. Imports nothing of cp_compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read while it is imported

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.compile import constants as keys
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from .arm import Arm, Shape, inputs, plain, training_step
from .hooks import mean_over_ranks
from .model import Llama, next_tokens

__all__ = ["ARMS"]


class _OwnLabels(nn.Module):
    """The model as AutoSP takes one: positions come from outside, and labels are shifted inside."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor) -> Tensor:
        return self.model(input_ids, next_tokens(labels), position_ids)


def autosp(shape: Shape, compiler: str) -> Arm:
    """AutoSP: passes in the compiler, as DeepSpeed documents them.

    A rank's loss is the mean of its own labels, and AutoSP cuts labels in front of the model's shift, so that loss and
    gradients are not those of the whole sequence.
    """
    world = dist.get_world_size()
    model = plain(shape)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": 1,
        "zero_optimization": {"stage": 0},
        "compile": {"deepcompile": True, "passes": ["autosp"]},
        "sequence_parallel_size": world,
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed("gloo")
    wrapped = _OwnLabels(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)  # an engine wants one; no step of it is taken
    engine, *_ = deepspeed.initialize(model=wrapped, optimizer=optimizer, config=config)
    engine.enable_backward_allreduce = False  # gradients are averaged outside of the measurement
    engine.compile(backend=compiler, compile_kwargs={"dynamic": True})
    ids, _, positions = inputs(shape)
    labels = ids.clone()
    # With DeepSpeed's prepare_autosp_inputs() each input gets a dynamic size of its own, and its pass finds none.
    ids.tag, labels.tag = (keys.AUTOSP_INPUT_ID_KEY, 1), (keys.AUTOSP_LABEL_ID_KEY, 1)
    positions.tag = (keys.AUTOSP_POSITION_ID_KEY, 1)

    def step() -> Tensor:
        model.zero_grad()
        loss = engine(input_ids=ids, labels=labels, position_ids=positions)
        engine.backward(loss)
        return loss.detach()

    return Arm(model, step, dict(model.named_parameters()), world, mean_of_losses=True)


def alst(shape: Shape, compiler: str) -> Arm:
    """ALST: a Llama of transformers on slices, with exchanges around its attention; eager."""
    model, parameters = _of_transformers(shape)
    world = dist.get_world_size()
    deepspeed.init_distributed("gloo")
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=world,
        micro_batch_size=1,
        seq_length=shape.length,
        seq_length_is_variable=False,
    )
    _, all_labels, _ = whole = inputs(shape)
    ids, labels, positions = (x.chunk(world, dim=1)[dist.get_rank()].contiguous() for x in whole)
    counted = (labels != -100).sum()

    def loss_of_all() -> Tensor:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        mine = model.loss_function(logits=logits, labels=None, vocab_size=shape.vocabulary, shift_labels=labels)
        return mean_over_ranks(mine * counted, all_labels)

    return Arm(model, training_step(model, loss_of_all), parameters, world)


_NAMES = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attention": "self_attn",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "head": "lm_head",
} | {name: f"{name}_proj" for name in "qkvo"}
"""Parts of the names of our parameters, and what transformers calls them."""


def _of_transformers(shape: Shape) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """The same model with the same weights as transformers has it, and its parameters under our names."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.dim,
        intermediate_size=3 * shape.dim,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length,
        rms_norm_eps=torch.finfo(torch.float32).eps,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    theirs = dict(model.named_parameters())
    ours = plain(shape).state_dict()
    names = {name: ".".join(_NAMES.get(part, part) for part in name.split(".")) for name in ours}
    names["norm.weight"] = "model.norm.weight"
    model.load_state_dict({names[name]: weight for name, weight in ours.items()})
    return model, {name: theirs[names[name]] for name in ours}


ARMS: Mapping[str, Callable[[Shape, str], Arm]] = {"autosp": autosp, "alst": alst}
