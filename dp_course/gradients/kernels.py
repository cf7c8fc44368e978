"""Functions without parameters that work for all examples at once, and attention made of them."""
import math

import torch
import torch.nn.functional as F


def _pooled(pool, dims):
    "Let a pool see the rows of all examples: under vmap it would take ten times as long."
    def for_all(input, *args, **kwargs):  # (rows,n,c,...) or (rows,c,...)
        rows, apart = input.flatten(0, -(dims + 2)), input.shape[:-(dims + 1)]
        if dims == 2 and not rows.is_cuda:
            rows = rows.contiguous(memory_format=torch.channels_last)  # several times as fast
        result = pool(rows, *args, **kwargs)
        if isinstance(result, tuple):
            return tuple(v.contiguous().view(*apart, *v.shape[1:]) for v in result)
        return result.contiguous().view(*apart, *result.shape[1:])

    return for_all


def _aligned(v, dims):  # (rows,...) -> (rows,1,...,1,...)
    "Insert the dimensions that a tensor lacks, behind the rows of all examples."
    return v.view(len(v), *[1]*(dims - v.dim()), *v.shape[1:])


def _attended(query, key, value, attn_mask=None, *args, **kwargs):  # (rows,...,t,c)
    "Attention for all examples in one call of torch's own kernel."
    given = [v for v in (query, key, value, attn_mask) if v is not None]
    dims = max(v.dim() for v in given)
    given = [_aligned(v, dims) for v in given]
    apart = torch.broadcast_shapes(*[v.shape[:-3] for v in given])
    if dims > 4:
        given = [v.expand(*apart, *v.shape[-3:]).flatten(0, -4) for v in given]
    query, key, value, *mask = given
    out = F.scaled_dot_product_attention(query, key, value, *mask or [None], *args, **kwargs)
    return out.view(*apart, *out.shape[1:]) if dims > 4 else out


def _cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
                   reduction="mean", label_smoothing=0.):
    "The loss of every example in one call, where each is the loss of one class or one map."
    known = weight is None and size_average is None and reduce is None and not label_smoothing
    of_rows = target.dim() > 1 and input.dim() == target.dim() + 1
    if not known or not of_rows or target.is_floating_point():
        return NotImplemented
    losses = F.cross_entropy(input.flatten(0, 1), target.flatten(0, 1), reduction="none",
                             ignore_index=ignore_index).view(target.shape)
    if reduction == "none":
        return losses
    total = losses.flatten(1).sum(1)
    return total/(target != ignore_index).flatten(1).sum(1) if reduction == "mean" else total


KERNELS = {  # function of torch -> the same for the rows of all examples
    F.scaled_dot_product_attention: _attended,
    F.cross_entropy: _cross_entropy,
    **{pool: _pooled(pool, dims) for pool, dims in (
        (F.max_pool1d, 1), (F.max_pool2d, 2), (F.max_pool3d, 3), (torch.max_pool1d, 1),
        (torch.max_pool2d, 2), (torch.max_pool3d, 3), (F.adaptive_max_pool1d, 1),
        (F.adaptive_max_pool2d, 2), (F.adaptive_max_pool3d, 3))}}


def _as_numbers(mask, like):
    "A mask as numbers that are added to scores."
    if mask is None or mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _projected(inputs, weights, biases, packed):
    "Queries, keys and values."
    query, key, value = inputs
    if packed is not None and query is key and key is value:
        return F.linear(query, *packed).chunk(3, -1)
    if packed is not None:
        weights = packed[0].chunk(3)
        biases = [None]*3 if packed[1] is None else packed[1].chunk(3)
    return [F.linear(v, w, bias) for v, w, bias in zip(inputs, weights, biases)]


def attention(
    query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
    add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None,
    need_weights=True, attn_mask=None, use_separate_proj_weight=False, q_proj_weight=None,
    k_proj_weight=None, v_proj_weight=None, static_k=None, static_v=None,
    average_attn_weights=True, is_causal=False,
):  # as `F.multi_head_attention_forward`
    "Attend in steps that have rules or kernels: project, mix, project."
    # Vaswani et al. 2017 (arXiv 1706.03762), section 3.2.2
    alone = query.dim() == 2
    inputs = query, key, value
    if alone:
        first = query[:, None]
        inputs = [first if v is query else v[:, None] for v in inputs]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    packed = None if use_separate_proj_weight else (in_proj_weight, in_proj_bias)
    weights = q_proj_weight, k_proj_weight, v_proj_weight
    biases = [None]*3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = _projected(inputs, weights, biases, packed)  # (t,n,d)
    t, n, d = q.shape
    mask, padding = (_as_numbers(m, q) for m in (attn_mask, key_padding_mask))
    if mask is not None and mask.dim() == 3:
        mask = mask.unflatten(0, (n, num_heads))
    more = 0
    if bias_k is not None:
        k = torch.cat([k, bias_k.expand(1, n, d)])
        v = torch.cat([v, bias_v.expand(1, n, d)])
        more += 1
    q, k, v = (u.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for u in (q, k, v))  # (n,h,t,c)
    k = k if static_k is None else static_k.unflatten(0, (n, num_heads))
    v = v if static_v is None else static_v.unflatten(0, (n, num_heads))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        more += 1
    if padding is not None:
        padding = F.pad(padding, (0, more))[:, None, None]
    if mask is not None:
        mask = F.pad(mask, (0, more))
    if mask is None or padding is None:
        both = padding if mask is None else mask
    else:
        both = mask + padding
    rate = dropout_p if training else 0.
    if need_weights:
        scores = q @ k.mT/math.sqrt(q.shape[-1])
        scores = scores if both is None else scores + both
        shares = F.dropout(scores.softmax(-1), rate)
        mixed = shares @ v
    else:
        causal = is_causal and padding is None and not more
        mixed = F.scaled_dot_product_attention(q, k, v, None if causal else both, rate, causal)
    out = F.linear(mixed.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias)
    shares = None if not need_weights else shares.mean(1) if average_attn_weights else shares
    if alone:
        out, shares = out[:, 0], None if shares is None else shares[0]
    return out, shares


def refuse_shared_table(
    max_norm,            # options of an embedding
    scale_grad_by_freq,
):
    "Refuse options by which an embedding writes into its table, or counts words of a batch."
    # ValueError
    if max_norm or scale_grad_by_freq:
        raise ValueError("an embedding with max_norm or scale_grad_by_freq writes into its table, "
                         "or weighs by counts of the batch: leave them out")


def bag_of_embeddings(input, weight, offsets=None, max_norm=None, norm_type=2.,
                      scale_grad_by_freq=False, mode="mean", sparse=False,
                      per_sample_weights=None, include_last_offset=False, padding_idx=None):
    "Look words up, and add up or average those of a bag."
    refuse_shared_table(max_norm, scale_grad_by_freq)
    if offsets is not None or mode == "max":
        return NotImplemented
    rows = F.embedding(input, weight, padding_idx)  # (n,t,d)
    shares = torch.ones_like(rows[..., 0]) if per_sample_weights is None else per_sample_weights
    if padding_idx is not None:
        shares = shares*(input != padding_idx % len(weight))
    total = (rows*shares[..., None]).sum(-2)
    return total/shares.sum(-1, keepdim=True).clamp(min=1) if mode == "mean" else total


def embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.,
              scale_grad_by_freq=False, sparse=False):
    "Look words up in a copy of the table; torch forgets under vmap that padding learns nothing."
    refuse_shared_table(max_norm, scale_grad_by_freq)
    if padding_idx is None:
        return NotImplemented
    rows = F.embedding(input, weight)
    padding = (input == padding_idx % len(weight))[..., None]
    return torch.where(padding, rows.detach(), rows)


COMPOSED = {F.embedding: embedding, F.embedding_bag: bag_of_embeddings,
            F.multi_head_attention_forward: attention}
