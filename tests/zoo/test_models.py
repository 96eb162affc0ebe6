"""A model of each kind, unmodified, beside its plain self. ``benchmarks/model_zoo.py`` asks all of them."""

from __future__ import annotations

import pytest

from benchmarks.zoo.batches import EXTRAS
from benchmarks.zoo.judge import judge
from benchmarks.zoo.models import MODELS

# Each kind of batch, both lengths and both numbers of ranks meet each kind of model.
CALLS = [
    ("Llama", "plain", 32, 2),
    ("Llama", "packed", 29, 4),
    ("Llama", "left padding", 29, 2),
    ("Llama 4 text", "right padding", 29, 4),
    ("Qwen2, sliding", "packed", 32, 2),
    ("Qwen3", "right padding", 32, 4),
    ("Mistral, sliding", "left padding", 29, 4),
    ("Phi-3, longrope", "plain", 29, 2),
    ("Gemma-3", "right padding", 29, 2),
    ("GPT-2", "left padding", 32, 4),
    ("Falcon, one kv head", "plain", 29, 4),
    ("Falcon, new decoder", "packed", 29, 2),
    ("Falcon, ALiBi", "right padding", 29, 2),
    ("DeepSeek-V3, dense", "left padding", 29, 2),
    ("OPT", "right padding", 29, 4),
    ("Gemma-2", "packed", 29, 4),
    ("gpt-oss", "left padding", 29, 4),
    ("Bloom", "right padding", 29, 4),
    ("MPT", "left padding", 32, 2),
    ("Llama, eager", "right padding", 29, 2),
    ("Falcon, eager", "plain", 29, 4),
    ("Mixtral", "left padding", 29, 4),
    ("Mixtral, balance loss", "right padding", 29, 4),
    ("Qwen3-MoE, balance loss", "plain", 32, 2),
    ("DeepSeek-V3", "packed", 29, 2),
    ("OLMoE", "right padding", 32, 4),
    ("DeepSeek-V3.2", "plain", 29, 2),
    ("Mamba-2", "plain", 29, 4),
    ("Qwen3-Next", "right padding", 29, 2),
    ("LFM2", "left padding", 32, 4),
    ("BERT, tokens", "right padding", 29, 4),
    ("ModernBERT, masked LM", "left padding", 29, 2),
    ("T5, decoder cut", "right padding", 29, 2),
    ("T5, encoder cut", "plain", 29, 4),
    ("Llama, sequence classes", "right padding", 29, 4),
    ("GPT-2, sequence classes", "left padding", 32, 2),
]


@pytest.mark.parametrize(("name", "batch", "length", "cp_size"), CALLS)
def test_exact(name: str, batch: str, length: int, cp_size: int) -> None:
    verdict = judge(MODELS[name], batch, length, cp_size)
    assert verdict.ok, verdict


@pytest.mark.parametrize("extra", list(EXTRAS))
@pytest.mark.parametrize(("name", "cp_size"), [("Llama", 4), ("Mixtral", 2)])
def test_what_trainers_add(name: str, cp_size: int, extra: str) -> None:
    verdict = judge(MODELS[name], "plain", 29, cp_size, extra)
    assert verdict.ok, verdict


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.refused])
def test_refused_with_the_line_and_the_remedy(name: str) -> None:
    verdict = judge(MODELS[name], "plain", 29, 2)
    assert verdict.ok, verdict
    assert "\n  at /" in verdict.refused
    assert "\n  remedy: " in verdict.refused
