"""Layouts of attention, whole keys and values, and attention that is not one SDPA call (A15)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cp_compile import verify
from tests.exact.lm import DIM, LM, VOCABULARY, Layer, cross_entropy, exact, seeded, tokens


def by_hand(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def soft_capped(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    length = q.shape[2]
    scores = 5.0 * ((q * 0.3) @ k.mT / 5.0).tanh()
    scores = scores + torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    return F.softmax(scores, -1, dtype=torch.float64).to(q.dtype) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Grouped queries by einsum, with no copies of k and v."""
    q = q.unflatten(1, (layer.kv_heads, -1))
    scores = torch.einsum("bkgqd,bksd->bkgqs", q, k)
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return torch.einsum("bkgqs,bksd->bkgqd", scores.where(mask, -1e9).softmax(-1), v).flatten(1, 2)


def folded(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Bloom's: heads in the batch, ALiBi through baddbmm, the mask on unfolded scores."""
    batch, heads, length, width = q.shape
    q, k, v = (t.reshape(batch * heads, length, width) for t in (q, k, v))
    alibi = (0.5 ** torch.arange(1, heads + 1))[:, None, None].double() * torch.arange(length)
    scores = torch.baddbmm(alibi.repeat(batch, 1, 1), q, k.mT, beta=1.0, alpha=0.3)
    scores = scores.view(batch, heads, length, length)
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -1e9)
    probs = scores.softmax(-1).view(batch * heads, length, length)
    return torch.bmm(probs, v).view(batch, heads, length, width)


def with_sinks(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """gpt-oss: a sink logit a head, concatenated to the scores and dropped behind the softmax."""
    sink = layer.o.weight[0, : layer.heads].view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
    scores = torch.cat((q @ k.mT, sink), -1)
    scores = scores - scores.max(-1, keepdim=True).values
    return scores.softmax(-1)[..., :-1] @ v


def normalised_by_hand(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    weights = (q @ k.mT * 0.2).exp().tril()
    return weights @ v / weights.sum(-1, keepdim=True)


def linear(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Linear attention without a mask: a sum over all keys, for which nothing is exchanged."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = k.mT @ v
    return q @ state / (q @ k.sum(2)[..., None])


def talking(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Heads mix between the two products: scores have no dim of their own to be cut in but the rows."""
    mix = layer.o.weight[:4, :4]
    scores = torch.einsum("hg,bgqk->bhqk", mix, q @ k.mT * 0.2)
    return scores.softmax(-1) @ v


def sequence_first(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """``[S, B, H, d]`` tensors, permuted in front of the attention."""
    q, k, v = (t.permute(2, 0, 1, 3).contiguous() for t in (q, k, v))
    y = F.scaled_dot_product_attention(*(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True)
    return y.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def three_dims(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    y = F.scaled_dot_product_attention(*(t.flatten(0, 1) for t in (q, k, v)), is_causal=True)
    return y.unflatten(0, (q.shape[0], -1))


def five_dims(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    q, k, v = (t.unflatten(3, (2, -1)).permute(0, 3, 1, 2, 4) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.permute(0, 2, 3, 1, 4).flatten(3)


def narrow_values(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Widths of k and v differ (multi-head latent attention pads, or leaves them so)."""
    y = F.scaled_dot_product_attention(q, k, v[..., :3], is_causal=True)
    return F.pad(y, (0, q.shape[-1] - 3))


def sink_tokens(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """Learned keys and values in front of the sequence's."""
    extra = layer.k.weight.view(1, 4, 8, DIM)[..., :2, :8].expand(q.shape[0], -1, -1, -1)
    k, v = torch.cat((extra, k), 2), torch.cat((extra * 2, v), 2)
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(2)
    return F.scaled_dot_product_attention(q, k, v, mask)


def two_attentions(q: Tensor, k: Tensor, v: Tensor, layer: Layer) -> Tensor:
    """A differential attention: two maps of half the width."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    one = F.scaled_dot_product_attention(q1, k1, v, is_causal=True)
    return one - 0.3 * F.scaled_dot_product_attention(q2, k2, v, is_causal=True)


SPELLINGS = [
    by_hand, soft_capped, grouped, folded, with_sinks, normalised_by_hand, sequence_first, three_dims, five_dims,
    narrow_values, sink_tokens, two_attentions,
]  # fmt: skip


@pytest.mark.parametrize("attend", SPELLINGS)
def test_spelling(attend: Any) -> None:
    exact(lambda: LM(attend=attend), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("attend", [by_hand, grouped, with_sinks])
def test_by_hand_where_heads_do_not_divide(attend: Any) -> None:
    """Keys and values are gathered."""
    (report,) = exact(lambda: LM(attend=attend, heads=3, width=4), [tokens(), tokens(seed=2)])
    assert report.exchanges.forward["all_gather_into_tensor"] == 2
    assert "all_to_all_single" not in report.exchanges.forward


def test_by_hand_costs_what_one_call_costs() -> None:
    (hand,) = exact(lambda: LM(attend=by_hand), [tokens(16), tokens(16)])
    (one,) = exact(lambda: LM(), [tokens(16), tokens(16)])
    assert hand.exchanges.forward == one.exchanges.forward
    assert hand.exchanges.backward == one.exchanges.backward


def test_grouped_by_hand() -> None:
    exact(lambda: LM(attend=grouped, heads=8, kv_heads=4, width=4), [tokens(), tokens(seed=2)])
    exact(lambda: LM(attend=grouped, heads=8, kv_heads=2, width=4), [tokens(), tokens(seed=2)])


class Several(nn.Module):
    """SDPA in two blocks, and another attention in the third."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.lm = LM(layers=3)
        self.lm.b[2].attend = attend

    def forward(self, *inputs: Tensor) -> Any:
        return self.lm(*inputs)


@pytest.mark.parametrize("attend", [by_hand, linear, talking])
def test_two_of_a_kind_and_one_of_another(attend: Any) -> None:
    exact(lambda: Several(attend), [tokens(), tokens(seed=2)])


@pytest.mark.parametrize("attend", [linear, talking])
def test_the_only_attention_where_the_sequence_is_named(attend: Any) -> None:
    """Neither is told by its form from a product of batches."""
    with pytest.raises(Exception, match=r"(?s)nothing to share.*sequence"):
        exact(lambda: LM(attend=attend), [tokens(), tokens(seed=2)])
    exact(lambda: LM(attend=attend), [tokens(), tokens(seed=2)], sequence=("args[0]", 1))


class Fused(nn.Module):
    """q, k and v are strided views of one projection."""

    def __init__(self, split: str) -> None:
        super().__init__()
        self.e, self.split = nn.Embedding(VOCABULARY, DIM), split
        self.qkv, self.o, self.h = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.e(ids)
        batch, length, _ = x.shape
        qkv = self.qkv(x)
        if self.split == "chunk":
            q, k, v = (t.view(batch, length, 4, 8).transpose(1, 2) for t in qkv.chunk(3, -1))
        elif self.split == "unbind":
            q, k, v = qkv.view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        else:  # by heads: q, k and v of a head stand together
            q, k, v = qkv.view(batch, length, 4, 24).transpose(1, 2).split(8, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits = self.h(x + self.o(y.transpose(1, 2).flatten(2)))
        return cross_entropy(logits, labels), logits


@pytest.mark.parametrize("split", ["chunk", "unbind", "heads"])
def test_views_of_one_projection(split: str) -> None:
    exact(lambda: Fused(split), [tokens(), tokens(seed=2)])


class Cross(nn.Module):
    """Self-attention, then attention to image features that every rank holds whole; or the other way round."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.lm, self.way = LM(), way
        self.q, self.kv, self.o = nn.Linear(DIM, DIM), nn.Linear(6, 2 * DIM), nn.Linear(DIM, DIM)
        self.latents = nn.Parameter(torch.randn(1, 3, DIM))
        self.kv_of_hidden = nn.Linear(DIM, 2 * DIM)

    def forward(self, ids: Tensor, labels: Tensor, image: Tensor) -> Any:
        h = self.lm.hidden(ids)
        heads = lambda t: t.unflatten(-1, (4, 8)).transpose(1, 2)
        if self.way == "to the image":
            q, (k, v) = self.q(h), self.kv(image).chunk(2, -1)
            y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
            h = h + self.o(y.transpose(1, 2).flatten(2))
        elif self.way == "to both":
            q, (k, v) = self.q(h), torch.cat((self.kv(image), self.kv_of_hidden(h)), 1).chunk(2, -1)
            y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v))
            h = h + self.o(y.transpose(1, 2).flatten(2))
        else:  # latents look at the sequence (a perceiver), and the sequence at them
            q, (k, v) = self.q(self.latents.expand(h.shape[0], -1, -1)), self.kv_of_hidden(h).chunk(2, -1)
            y = F.scaled_dot_product_attention(heads(q), heads(k), heads(v)).transpose(1, 2).flatten(2)
            y = F.layer_norm(y, (DIM,))
            h = h + F.scaled_dot_product_attention(heads(h), heads(y), heads(y)).transpose(1, 2).flatten(2)
        logits = self.lm.h(h)
        return cross_entropy(logits, labels), logits


IMAGE = torch.randn(2, 5, 6, dtype=torch.float64)


@pytest.mark.parametrize("way", ["to the image", "to both", "latents"])
def test_whole_keys_and_values(way: str) -> None:
    exact(lambda: Cross(way), [tokens(), tokens(seed=2), IMAGE])


class Prefixed(nn.Module):
    """Learned prefix tokens, or image features, in front of the embeddings; their logits are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = LM()
        self.prefix, self.project = nn.Parameter(torch.randn(3, DIM)), nn.Linear(6, DIM)

    def forward(self, ids: Tensor, labels: Tensor, image: Tensor | None = None) -> Any:
        prefix = self.prefix.expand(ids.shape[0], -1, -1) if image is None else self.project(image)
        x = torch.cat((prefix, self.lm.e(ids)), 1)
        for block in self.lm.b:
            x = block(x, torch.arange(x.shape[1]))
        logits = self.lm.h(self.lm.f(x))[:, prefix.shape[1] :]
        return cross_entropy(logits, labels), logits


def test_a_prefix() -> None:
    exact(Prefixed, [tokens(), tokens(seed=2)], cp_sizes=(2, 4))
    exact(Prefixed, [tokens(), tokens(seed=2), IMAGE])


class Library(nn.Module):
    """``nn.MultiheadAttention`` or ``nn.TransformerEncoderLayer``."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.e, self.h = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.layer: nn.Module
        if kind == "mha":
            self.layer = nn.MultiheadAttention(DIM, 4, batch_first=options.pop("batch_first", True))
        else:
            self.layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True, **options)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.e(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        if self.kind == "mha":
            x = x if self.layer.batch_first else x.transpose(0, 1)
            y, _ = self.layer(x, x, x, attn_mask=mask, **self.options)
            y = y if self.layer.batch_first else y.transpose(0, 1)
        else:
            y = self.layer(x, src_mask=mask)
        logits = self.h(y)
        return cross_entropy(logits, labels), logits


LIBRARY = [
    ("mha", {"need_weights": False}),
    ("mha", {"need_weights": True}),
    ("mha", {"need_weights": False, "batch_first": False}),
    ("encoder", {}),
    ("encoder", {"norm_first": True}),
]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("kind", "options"), LIBRARY, ids=str)
def test_of_torch_nn(kind: str, options: dict[str, Any], training: bool) -> None:
    module = seeded(lambda: Library(kind, **options)).train(training)
    exact(module, [tokens(), tokens(seed=2)])


@torch.library.custom_op("cp_compile_tests::attend", mutates_args=())
def custom(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


@custom.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def custom_backward(ctx: Any, grad: Tensor) -> Any:
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        return torch.autograd.grad(F.scaled_dot_product_attention(*inputs), inputs, grad)


custom.register_autograd(custom_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def test_an_unknown_op_is_refused_by_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = LM(layers=2)
            self.lm.b[1].attend = lambda q, k, v, layer: custom(q, k, v)

        def forward(self, *inputs: Tensor) -> Any:
            return self.lm(*inputs)

    module = seeded(Model)
    with pytest.raises(
        Exception, match=r"(?s)cp_compile_tests\.attend\.default has no rule.*test_attention\.py.*remedy"
    ):
        verify(module, [tokens(), tokens(seed=2)], cp_size=4)
    with torch.no_grad():
        exact(module, [tokens(), tokens(seed=2)], fallback="gather")
