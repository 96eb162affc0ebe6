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
        kv_heads: of each layer, beside 4 query heads.
        widths: of the heads of queries and keys, and of values.
        attentions: attentions in which all positions look at each other as heads; 0: other layers send too.
        layers: that exchange anything.
        without: batches that the model itself does not take.
        extras: whether the arguments that trainers add are tried with it.
        ready: what its user's script must say before compiling, as attributes of the model.
        options: of the backend.
        refused: a pattern that the refusal matches, if this model is refused.
    """

    name: str
    kind: str
    config: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    head: str = "AutoModelForCausalLM"
    attention: str | None = None
    kv_heads: int = 2
    widths: tuple[int, int] = (8, 8)
    attentions: int = 2
    layers: int = 2
    without: tuple[str, ...] = ()
    extras: bool = False
    ready: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """Query heads, kv heads, and the widths of keys and values."""
        return (4, self.kv_heads, *self.widths)


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
    from transformers.utils.output_capturing import maybe_install_capturing_hooks

    config = getattr(transformers, entry.config)(**{**_SMALL, **entry.settings})
    options = {} if entry.attention is None else {"attn_implementation": entry.attention}
    torch.manual_seed(seed)
    head = getattr(transformers, entry.head)
    make = getattr(head, "from_config", None) or head._from_config
    model: Any = make(config, **options).double().train()
    for parameter in model.parameters():
        with torch.no_grad():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    for name, value in entry.ready.items():
        setattr(model, name, value)
    if entry.settings.get("output_router_logits"):
        maybe_install_capturing_hooks(model)
    return model  # type: ignore[no-any-return]


# What several tables below share: every dropout at 0, and what makes a model special made small.
_WIDTH = {"head_dim": 8}
_WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "attention_dropout_prob": 0.0}
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 8}
_BALANCE = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_MLA = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_DENSE_MLA = {**_MLA, "first_k_dense_replace": 2}
_GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "n_inner": 48,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_GPT2_CLASSES = {**_GPT2, "num_labels": 3}
_MODERN = {"local_attention": 8, **_WINDOW}
_FALCON = {"ffn_hidden_size": 48, **_NO_DROPOUT}
_OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
_T5_TOKENS = {**_T5, "num_labels": 5, "classifier_dropout": 0.0}
_T5_BOTH = {**_T5, "decoder_start_token_id": 0}
_DECODER = {"sequence": ("labels", 1)}
_ENCODER = {"sequence": ("input_ids", 1)}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 16,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "expansion_ratio": 2}
_SPARSE = {**_MLA, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
_DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 128,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
}
_BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
    "attn_layer_indices": [1],
}
_LOSS = {"loss_type": "ForCausalLM"}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2}
_NEXT = {
    **_MOE,
    **_WIDTH,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 16,
}
_LLAMA4 = {
    **_MOE,
    **_WIDTH,
    "intermediate_size_mlp": 48,
    "attention_chunk_size": 8,
    "num_experts_per_tok": 1,
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 2,
}
_NEO = {
    "num_layers": 2,
    "num_heads": 4,
    "window_size": 8,
    "attention_types": [[["global", "local"], 1]],
    "resid_dropout": 0.0,
    "embed_dropout": 0.0,
    "attention_dropout": 0.0,
}
_RGEMMA = {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"], **_WIDTH}
_JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "mamba_d_state": 8,
    "use_mamba_kernels": False,
    "mamba_dt_rank": 4,
}


def _call(name: str, config: str, settings: Mapping[str, Any] | None = None, **fields: Any) -> Entry:
    return Entry(name, KINDS[0], config, settings or {}, **fields)


def _hand(name: str, config: str, settings: Mapping[str, Any] | None = None, **fields: Any) -> Entry:
    return Entry(name, KINDS[1], config, settings or {}, **fields)


def _eager(name: str, config: str, settings: Mapping[str, Any] | None = None, **fields: Any) -> Entry:
    return Entry(f"{name}, eager", KINDS[1], config, settings or {}, attention="eager", **fields)


def _experts(name: str, config: str, settings: Mapping[str, Any], **fields: Any) -> Entry:
    return Entry(name, KINDS[2], config, settings, **fields)


def _hybrid(name: str, config: str, settings: Mapping[str, Any], **fields: Any) -> Entry:
    return Entry(name, KINDS[3], config, settings, attentions=0, **fields)


def _encoder(name: str, config: str, settings: Mapping[str, Any], head: str, **fields: Any) -> Entry:
    return Entry(name, KINDS[4], config, settings, head, **fields)


_MHA: dict[str, Any] = {"kv_heads": 4}
_LATENT: dict[str, Any] = {"kv_heads": 4, "widths": (10, 5)}
_TABLE = (
    _call("Llama", "LlamaConfig", extras=True),
    _call("Llama, yarn", "LlamaConfig", {"rope_parameters": _YARN}),
    _call("Llama 4 text", "Llama4TextConfig", _LLAMA4, head="Llama4ForCausalLM"),
    _call("Qwen2", "Qwen2Config"),
    _call("Qwen2, sliding", "Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    _call("Qwen3", "Qwen3Config", _WIDTH),
    _call("Mistral, sliding", "MistralConfig", {"sliding_window": 8}),
    _call("Phi", "PhiConfig"),
    _call("Phi-3", "Phi3Config"),
    _call("Phi-3, longrope", "Phi3Config", {"rope_parameters": _LONG, "original_max_position_embeddings": 16}),
    _call("OLMo-2", "Olmo2Config"),
    _call("OLMo-3", "Olmo3Config", _WINDOW),
    _call("Gemma", "GemmaConfig", _WIDTH),
    _call("Gemma-3", "Gemma3TextConfig", {**_WIDTH, **_WINDOW}),
    _call("Cohere", "CohereConfig"),
    _call("Cohere-2", "Cohere2Config", _WINDOW),
    _call("Granite", "GraniteConfig"),
    _call("SmolLM3", "SmolLM3Config", {"no_rope_layers": [1, 0]}),
    _call("GPT-2", "GPT2Config", _GPT2, ready=_LOSS, **_MHA),
    _call("GPT-2, as it comes", "GPT2Config", _GPT2, refused=r'model\.loss_type \("ForCausalLM"\)'),
    _call("GPT-J", "GPTJConfig", {**_GPT2, "rotary_dim": 4}, **_MHA),
    _call("GPT-NeoX", "GPTNeoXConfig", _NO_DROPOUT, **_MHA),
    _call("GPT-BigCode", "GPTBigCodeConfig", _GPT2, kv_heads=1),
    _call("Falcon, one kv head", "FalconConfig", {**_FALCON, "multi_query": True}, kv_heads=1),
    _call("Falcon, new decoder", "FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    _call("Falcon, ALiBi", "FalconConfig", {**_FALCON, "alibi": True, "multi_query": False}, **_MHA),
    _call("DeepSeek-V3, dense", "DeepseekV3Config", _DENSE_MLA, **_LATENT),
    _call("StableLM", "StableLmConfig", {"hidden_dropout": 0.0}),
    _call("StarCoder2", "Starcoder2Config", {"sliding_window": 8, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    _call("OPT", "OPTConfig", _OPT, **_MHA),
    _call("Nemotron", "NemotronConfig"),
    _call("GLM-4", "Glm4Config", _WIDTH),
    _call("Helium", "HeliumConfig", _WIDTH),
    _call("EXAONE-4", "Exaone4Config", _WINDOW),
    _call("ModernBERT decoder", "ModernBertDecoderConfig", _MODERN, **_MHA),
    _call("Llama, dynamic rope", "LlamaConfig", {"rope_parameters": _DYNAMIC}, refused='rope_type such as "yarn"'),
    _call("Llama, flex", "LlamaConfig", attention="flex_attention", refused='attn_implementation="sdpa"'),
    _hand("Gemma-2", "Gemma2Config", {**_WIDTH, **_WINDOW}),
    _hand("gpt-oss", "GptOssConfig", {**_MOE, **_WIDTH, **_WINDOW}),
    _hand("Bloom", "BloomConfig", {"n_layer": 2, "n_head": 4, **_NO_DROPOUT}, **_MHA),
    _hand("MPT", "MptConfig", _MPT, **_MHA),
    _hand("GPT-Neo", "GPTNeoConfig", _NEO, **_MHA, attentions=0),  # q and k are cast to float32 in front of the scores
    _eager("Llama", "LlamaConfig", extras=True),
    _eager("Qwen3", "Qwen3Config", _WIDTH),
    _eager("Mistral", "MistralConfig", {"sliding_window": 8}),
    _eager("Phi-3", "Phi3Config"),
    _eager("Cohere", "CohereConfig"),
    _eager("GPT-2", "GPT2Config", _GPT2, ready=_LOSS, **_MHA),
    _eager("GPT-NeoX", "GPTNeoXConfig", _NO_DROPOUT, **_MHA),
    _eager("Falcon", "FalconConfig", _FALCON, kv_heads=1),
    _eager("OPT", "OPTConfig", _OPT, **_MHA),
    _eager("DeepSeek-V3, dense", "DeepseekV3Config", _DENSE_MLA, **_LATENT),
    _experts("Mixtral", "MixtralConfig", _MOE, extras=True),
    _experts("Mixtral, balance loss", "MixtralConfig", {**_MOE, **_BALANCE}),
    _experts("Qwen3-MoE", "Qwen3MoeConfig", {**_MOE, **_WIDTH}),
    _experts("Qwen3-MoE, balance loss", "Qwen3MoeConfig", {**_MOE, **_WIDTH, **_BALANCE}),
    _experts("Qwen2-MoE", "Qwen2MoeConfig", {**_MOE, "shared_expert_intermediate_size": 16}),
    _experts("DeepSeek-V3", "DeepseekV3Config", _MLA, **_LATENT),
    _experts("DeepSeek-V2", "DeepseekV2Config", {**_MLA, "topk_method": "greedy"}, **_LATENT),
    _experts("DeepSeek-V3.2", "DeepseekV32Config", _SPARSE, **_LATENT, attentions=0),
    _experts("OLMoE", "OlmoeConfig", _MOE),
    _experts("Granite-MoE", "GraniteMoeConfig", _MOE),
    _experts("GLM-4-MoE", "Glm4MoeConfig", {**_MLA, **_WIDTH, "num_key_value_heads": 2}),
    _experts("ERNIE-4.5-MoE", "Ernie4_5_MoeConfig", {**_MOE, "moe_num_experts": 8, "moe_k": 2}),
    _experts("DBRX", "DbrxConfig", _DBRX, refused="grouped matmul"),
    _hybrid("Mamba-2", "Mamba2Config", _MAMBA2),
    _hybrid("Mamba", "MambaConfig", {"state_size": 8}, refused="config.use_associative_scan = False"),
    _hybrid("Mamba, step by step", "MambaConfig", {"state_size": 8, "use_associative_scan": False}),
    _hybrid("Qwen3-Next", "Qwen3NextConfig", _NEXT),
    _hybrid("Bamba", "BambaConfig", _BAMBA),
    _hybrid("Jamba", "JambaConfig", _JAMBA, refused="config.use_associative_scan = False"),
    _hybrid("LFM2", "Lfm2Config", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    _hybrid("RecurrentGemma", "RecurrentGemmaConfig", _RGEMMA),
    _encoder("BERT, tokens", "BertConfig", {**_BERT, "num_labels": 5}, "AutoModelForTokenClassification", **_MHA),
    _encoder("BERT, masked LM", "BertConfig", _BERT, "AutoModelForMaskedLM", **_MHA),
    _encoder(
        "ModernBERT, masked LM", "ModernBertConfig", {"local_attention": 8, **_WINDOW}, "AutoModelForMaskedLM", **_MHA
    ),
    _encoder(
        "T5, tokens",
        "T5Config",
        {**_T5, "num_labels": 5, "classifier_dropout": 0.0},
        "T5ForTokenClassification",
        **_MHA,
    ),
    _encoder("T5, decoder cut", "T5Config", _T5_BOTH, "AutoModelForSeq2SeqLM", **_MHA, attentions=0, options=_DECODER),
    _encoder("T5, encoder cut", "T5Config", _T5_BOTH, "AutoModelForSeq2SeqLM", **_MHA, attentions=0, options=_ENCODER),
    _encoder("T5, as it comes", "T5Config", _T5_BOTH, "AutoModelForSeq2SeqLM", refused=r'options=\{"sequence"'),
    _encoder("Llama, sequence classes", "LlamaConfig", {"num_labels": 3}, "AutoModelForSequenceClassification"),
    _encoder(
        "GPT-2, sequence classes",
        "GPT2Config",
        {**_GPT2, "num_labels": 3},
        "AutoModelForSequenceClassification",
        **_MHA,
    ),
)
MODELS = {entry.name: entry for entry in _TABLE}
