"""Every kernel in plain torch: the twin that the others are tested against, and the body where none of them runs.

In float32 a token's result does not depend, to the bit, on the other rows of the batch: matrix products run in tiles
of one fixed shape, and a query visits its keys in tiles of one size counted from position 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.gumbel import gumbel_choice
from kernels.layouts import Caches, Drawn, Ragged, Rope, RowChoices, TokenSlots

QUERY_TILE = 16
KEY_TILE = 128


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., N], weight [N] -> like x; in float32 inside."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual [T, N] += x [T, N] in place; returns the norm of the sum."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I], the gate first -> [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rope_and_cache(qkv: Tensor, rope: Rope, slots: TokenSlots, caches: Caches) -> Tensor:
    """qkv [T, (H + 2 Hkv) D] -> rotated q [T, H, D]; writes rotated k and v to their slots."""
    num_kv_heads, head_dim = caches.num_kv_heads, caches.head_dim
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = heads.tensor_split((heads.shape[1] - 2 * num_kv_heads, heads.shape[1] - num_kv_heads), dim=1)
    if rope.q_norm is not None and rope.k_norm is not None:
        q, k = rms_norm(q, rope.q_norm, rope.eps), rms_norm(k, rope.k_norm, rope.eps)
    cos, sin = rope.cos_sin[slots.positions].unsqueeze(1).chunk(2, dim=-1)
    is_kept = slots.slot_mapping >= 0
    kept = slots.slot_mapping[is_kept]
    block, offset = kept // caches.block_size, kept % caches.block_size
    caches.k[block, :, offset] = _rotate(k, cos, sin)[is_kept].to(caches.k.dtype)
    caches.v[block, :, offset] = v[is_kept].to(caches.v.dtype)
    return _rotate(q, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def draw_tokens(logits: Tensor, choices: RowChoices) -> Drawn:
    peaks, tokens = logits.max(dim=-1)
    is_valid = torch.isfinite(peaks)
    shifted = logits - peaks[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)
    drawn = torch.nonzero((choices.temperatures > 0) & is_valid)[:, 0]
    own = RowChoices(*(part[drawn] for part in choices))
    scaled = shifted[drawn] / own.temperatures[:, None]
    allowed = scaled.masked_fill(scaled < _limits(scaled, own.top_ks, own.top_ps), -torch.inf)
    tokens[drawn] = gumbel_choice(allowed, ids.expand(len(drawn), -1), own.keys)
    return Drawn(torch.where(is_valid, tokens, 0), peaks, shifted.exp_().sum(-1, dtype=torch.float64))


def _limits(scaled: Tensor, top_ks: Tensor, top_ps: Tensor) -> Tensor:
    """The smallest value [r, 1] that is allowed in each row [r, V]; -inf where all are."""
    width = scaled.shape[1]
    limits = torch.full_like(scaled[:, :1], -torch.inf)
    has_k, has_p = (top_ks > 0) & (top_ks < width), top_ps < 1.0
    rows = torch.nonzero(has_k | has_p)[:, 0]
    if not rows.numel():
        return limits
    ordered = scaled[rows].sort(dim=-1, descending=True).values
    kth = ordered.gather(1, (top_ks[rows].clamp(1, width) - 1)[:, None])
    kth = torch.where(has_k[rows, None], kth, -torch.inf)
    masses = torch.where(ordered < kth, 0.0, ordered.exp()).double().cumsum(-1)
    num_before = (masses < (top_ps[rows] * masses[:, -1])[:, None]).sum(-1)
    nucleus = ordered.gather(1, num_before.clamp(max=width - 1)[:, None])
    limits[rows] = torch.maximum(kth, torch.where(has_p[rows, None], nucleus, -torch.inf))
    return limits


def largest_tokens(logits: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    return values[:, :num_tokens].contiguous(), ids[:, :num_tokens].contiguous()


def paged_attention(query: Tensor, caches: Caches, ragged: Ragged, scale: float) -> Tensor:
    """query [T, H, D] -> [T, H, D]: causal attention of every new token over its sequence's cached and new ones."""
    output = torch.empty_like(query)
    starts, context_lens = ragged.query_starts.tolist(), ragged.context_lens.tolist()
    for seq, context_len in enumerate(context_lens):
        first, end = starts[seq], starts[seq + 1]
        if context_len == 0:
            output[first:end] = 0
            continue
        num_blocks = -(-context_len // caches.block_size)
        blocks = ragged.block_tables[seq, :num_blocks].long()
        k, v = (_padded_context(cache, blocks, context_len) for cache in caches)
        for row in range(first, end, QUERY_TILE):
            stop = min(row + QUERY_TILE, end)
            position = context_len - (end - row)
            output[row:stop] = _attend_tile(query[row:stop].float() * scale, k, v, position)
    return output


def _padded_context(cache: Tensor, blocks: Tensor, context_len: int) -> Tensor:
    """The sequence's K or V as [Hkv, L, D] float32, L a multiple of KEY_TILE, zeros past the context (where a last
    block may hold another sequence's leavings, NaN included)."""
    flat = cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].float()
    return F.pad(flat, (0, 0, 0, -flat.shape[1] % KEY_TILE))


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
    """q [n <= QUERY_TILE, H, D] at positions from `position` on; running softmax over tiles of keys."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[0]
    group = num_heads // num_kv_heads
    tile = F.pad(q, (0, 0, 0, 0, 0, QUERY_TILE - num_rows))
    tile = tile.view(QUERY_TILE, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2).contiguous()
    row_positions = (position + torch.arange(QUERY_TILE, device=q.device)).repeat(group)
    peak = torch.full((num_kv_heads, group * QUERY_TILE, 1), -torch.inf, device=q.device)
    total, acc = torch.zeros_like(peak), torch.zeros_like(tile)
    for start in range(0, position + num_rows, KEY_TILE):
        keys, values = k[:, start : start + KEY_TILE], v[:, start : start + KEY_TILE]
        key_positions = start + torch.arange(KEY_TILE, device=q.device)
        scores = torch.bmm(tile, keys.transpose(1, 2))
        scores.masked_fill_(key_positions > row_positions[:, None], -torch.inf)
        new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
        decay, weights = torch.exp(peak - new_peak), torch.exp(scores - new_peak)
        total = total * decay + weights.sum(-1, keepdim=True)
        acc = acc * decay + torch.bmm(weights, values)
        peak = new_peak
    result = (acc / total).view(num_kv_heads, group, QUERY_TILE, head_dim).permute(2, 0, 1, 3)
    return result.reshape(QUERY_TILE, num_heads, head_dim)[:num_rows]


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """staging[i] = pool[block_ids[i]]."""
    torch.index_select(pool, 0, block_ids, out=staging)


def scatter_blocks(staging: Tensor, block_ids: Tensor, pool: Tensor) -> None:
    """pool[block_ids[i]] = staging[i]."""
    pool.index_copy_(0, block_ids, staging)
