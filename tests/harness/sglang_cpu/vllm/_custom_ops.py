"""The three operators that SGLang asks vLLM for on a CPU, written with torch."""

import torch


def rms_norm(out, x, weight, epsilon):
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    out.copy_((x.float() * scale).to(x.dtype) * weight)


def fused_add_rms_norm(x, residual, weight, epsilon):
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., : 2 * cos.shape[-1]]
        first, second = rotated.chunk(2, dim=-1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        a, b = cos.unsqueeze(1).to(tensor.dtype), sin.unsqueeze(1).to(tensor.dtype)
        new = first * a - second * b, second * a + first * b
        rotated.copy_(torch.cat(new, -1) if is_neox else torch.stack(new, -1).flatten(-2))


_zeros = torch.zeros


def zeros(*size, pin_memory=False, **options):
    """Memory that is not pinned: a torch without a device has none, and SGLang asks for some where it notes experts."""
    return _zeros(*size, **options)


torch.zeros = zeros
