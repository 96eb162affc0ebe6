"""The table of models: a configuration of two small layers each, with everything that makes the model what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["KINDS", "MODELS", "Entry", "build"]

KINDS = ("attention as one call", "attention by hand", "experts", "hybrid", "encoder")


@dataclass(frozen=True)
class Entry:
    """One model of the zoo.

    Attributes:
        name: as people call it, with what makes this variant special.
        kind: one of ``KINDS``.
        config: the configuration class in ``transformers``.
        settings: of the configuration, over ``_SMALL``.
        head: the class of ``transformers`` that builds the model from a configuration.
        attention: ``attn_implementation``; ``None``: what the library chooses.
        inputs: more arguments of the forward.
        refused: a pattern that the refusal matches, if this model is refused.
    """

    name: str
    kind: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    attention: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""


_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(entry: Entry, seed: int = 0) -> torch.nn.Module:
    """The model in float64 and train mode, every parameter drawn so that attention matters: matrices keep the size of
    what they multiply, instead of the library's 0.02, under which a missing exchange is below 0.1 % of the loss."""
    import transformers

    config = getattr(transformers, entry.config)(**{**_SMALL, **entry.settings})
    options = {} if entry.attention is None else {"attn_implementation": entry.attention}
    torch.manual_seed(seed)
    head = getattr(transformers, entry.head)
    model = head.from_config(config, **options) if hasattr(head, "from_config") else head._from_config(config, **options)
    model = model.double().train()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def _table() -> list[Entry]:
    call, hand, experts, hybrid, encoder = KINDS
    head8 = {"head_dim": 8}
    windows = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    sliding = ["sliding_attention", "full_attention"]
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 8}
    off = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout_prob": 0.0}
    mla = {
        "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1,
    }  # fmt: skip
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}
    gpt2_still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    falcon = {"ffn_hidden_size": 48, **off}
    bloom = {"n_layer": 2, "n_head": 4, **off}
    mpt = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2}
    eager = lambda name, config, **settings: Entry(f"{name}, eager", hand, config, settings, attention="eager")
    return [
        Entry("Llama", call, "LlamaConfig"),
        Entry("Llama, yarn", call, "LlamaConfig", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}}),
        Entry("Llama 4 text", call, "Llama4TextConfig", {**moe, **head8, "intermediate_size_mlp": 48, "attention_chunk_size": 8, "num_experts_per_tok": 1, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2}, head="Llama4ForCausalLM"),
        Entry("Qwen2", call, "Qwen2Config"),
        Entry("Qwen2, sliding", call, "Qwen2Config", windows),
        Entry("Qwen3", call, "Qwen3Config", head8),
        Entry("Mistral, sliding", call, "MistralConfig", {"sliding_window": 8}),
        Entry("Ministral", call, "MinistralConfig", {"sliding_window": 8, "layer_types": sliding}),
        Entry("Phi-3", call, "Phi3Config"),
        Entry("Phi", call, "PhiConfig"),
        Entry("OLMo-2", call, "Olmo2Config"),
        Entry("OLMo-3", call, "Olmo3Config", {"sliding_window": 8, "layer_types": sliding}),
        Entry("Gemma", call, "GemmaConfig", head8),
        Entry("Gemma-3", call, "Gemma3TextConfig", {**head8, "sliding_window": 8, "layer_types": sliding}),
        Entry("Cohere", call, "CohereConfig"),
        Entry("Cohere-2", call, "Cohere2Config", {"sliding_window": 8, "layer_types": sliding}),
        Entry("Granite", call, "GraniteConfig"),
        Entry("SmolLM3", call, "SmolLM3Config", {"no_rope_layers": [1, 0]}),
        Entry("GPT-2", call, "GPT2Config", {**gpt2, **gpt2_still}),
        Entry("GPT-J", call, "GPTJConfig", {**gpt2, **gpt2_still, "rotary_dim": 4}),
        Entry("GPT-Neo", call, "GPTNeoConfig", {"num_layers": 2, "num_heads": 4, "window_size": 8, "attention_types": [[["global", "local"], 1]], "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}),
        Entry("GPT-NeoX", call, "GPTNeoXConfig", off),
        Entry("GPT-BigCode", call, "GPTBigCodeConfig", {**gpt2, **gpt2_still}),
        Entry("Falcon, one kv head", call, "FalconConfig", {**falcon, "multi_query": True, "new_decoder_architecture": False}),
        Entry("Falcon, new decoder", call, "FalconConfig", {**falcon, "new_decoder_architecture": True, "num_kv_heads": 2}),
        Entry("Falcon, ALiBi", call, "FalconConfig", {**falcon, "alibi": True, "multi_query": False}),
        Entry("DeepSeek-V3 dense", call, "DeepseekV3Config", {**mla, "first_k_dense_replace": 2}),
        Entry("StableLM", call, "StableLmConfig", {"hidden_dropout": 0.0}),
        Entry("StarCoder2", call, "Starcoder2Config", {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
        Entry("OPT", call, "OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
        Entry("Nemotron", call, "NemotronConfig"),
        Entry("GLM-4", call, "Glm4Config", head8),
        Entry("Helium", call, "HeliumConfig", head8),
        Entry("EXAONE-4", call, "Exaone4Config", {"sliding_window": 8, "layer_types": sliding}),
        Entry("ModernBERT decoder", call, "ModernBertDecoderConfig", {"local_attention": 8, "layer_types": sliding}),
        Entry("Gemma-2", hand, "Gemma2Config", {**head8, "sliding_window": 8, "layer_types": sliding}),
        Entry("gpt-oss", hand, "GptOssConfig", {**moe, **head8, "sliding_window": 8, "layer_types": sliding}),
        Entry("Bloom", hand, "BloomConfig", bloom),
        Entry("MPT", hand, "MptConfig", mpt),
        eager("Llama", "LlamaConfig"),
        eager("Qwen3", "Qwen3Config", **head8),
        eager("Mistral", "MistralConfig", sliding_window=8),
        eager("Phi-3", "Phi3Config"),
        eager("GPT-2", "GPT2Config", **gpt2, **gpt2_still),
        eager("GPT-NeoX", "GPTNeoXConfig", **off),
        eager("Falcon", "FalconConfig", **falcon),
        eager("Cohere", "CohereConfig"),
        eager("DeepSeek-V3 dense", "DeepseekV3Config", **{**mla, "first_k_dense_replace": 2}),
        eager("OPT", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32, dropout=0.0),
        Entry("Mixtral", experts, "MixtralConfig", moe),
        Entry("Mixtral, balance loss", experts, "MixtralConfig", {**moe, "output_router_logits": True, "router_aux_loss_coef": 0.5}),
        Entry("Qwen3-MoE", experts, "Qwen3MoeConfig", {**moe, **head8}),
        Entry("Qwen3-MoE, balance loss", experts, "Qwen3MoeConfig", {**moe, **head8, "output_router_logits": True, "router_aux_loss_coef": 0.5}),
        Entry("Qwen2-MoE", experts, "Qwen2MoeConfig", {**moe, "shared_expert_intermediate_size": 16}),
        Entry("DeepSeek-V3", experts, "DeepseekV3Config", mla),
        Entry("DeepSeek-V2", experts, "DeepseekV2Config", {**mla, "topk_method": "greedy"}),
        Entry("OLMoE", experts, "OlmoeConfig", moe),
        Entry("Granite-MoE", experts, "GraniteMoeConfig", moe),
        Entry("GLM-4-MoE", experts, "Glm4MoeConfig", {**mla, **head8, "num_key_value_heads": 2}),
        Entry("ERNIE-4.5-MoE", experts, "Ernie4_5_MoeConfig", {**moe, "moe_num_experts": 8, "moe_k": 2}),
        Entry("DBRX", experts, "DbrxConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}}),
        Entry("Mamba-2", hybrid, "Mamba2Config", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}),
        Entry("Mamba", hybrid, "MambaConfig", {"state_size": 8}),
        Entry("Qwen3-Next", hybrid, "Qwen3NextConfig", {**moe, **head8, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}),
        Entry("Bamba", hybrid, "BambaConfig", {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_expand": 2, "attn_layer_indices": [1], "layer_types": ["mamba", "attention"]}),
        Entry("Jamba", hybrid, "JambaConfig", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False, "mamba_dt_rank": 4}),
        Entry("LFM2", hybrid, "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
        Entry("RecurrentGemma", hybrid, "RecurrentGemmaConfig", {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"], **head8}),
        Entry("BERT, tokens", encoder, "BertConfig", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 5}, head="AutoModelForTokenClassification"),
        Entry("BERT, masked LM", encoder, "BertConfig", {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, head="AutoModelForMaskedLM"),
        Entry("ModernBERT, masked LM", encoder, "ModernBertConfig", {"local_attention": 8, "layer_types": sliding}, head="AutoModelForMaskedLM"),
        Entry("Llama, sequence classes", encoder, "LlamaConfig", {"num_labels": 3}, head="AutoModelForSequenceClassification"),
        Entry("GPT-2, sequence classes", encoder, "GPT2Config", {**gpt2, **gpt2_still, "num_labels": 3}, head="AutoModelForSequenceClassification"),
        Entry("T5", encoder, "T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}, head="AutoModelForSeq2SeqLM"),
    ]  # fmt: skip


MODELS = {entry.name: entry for entry in _table()}
