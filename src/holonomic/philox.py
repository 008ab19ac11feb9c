"""Normal numbers without a state: each is a function of a key and its place.

Philox4x32-10 (Salmon et al. 2011) is a bijection of 128-bit counters for every 64-bit key. The four
words of a counter are (block, slot, step mod 2^32, step div 2^32); the four words that come out make two
pairs of normal numbers by Box and Muller's method. Element e of a tensor is word (e div 16) mod 4 of
block 16 (e div 64) + e mod 16: 64 neighbours make a tile, and vector instructions write them in order. A
block has 32 bits, so a stream has 2^34 numbers at every step and slot.

`normal` does this in torch, on any device; the compiled kernels do the same, to rounding.
"""

import math

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
TILE, LANES = 64, 16
NUMBERS = TILE << 28  # of a stream, at one step and slot
_CHUNK = 1 << 16  # numbers made together: what they need stays in the cache


def normal(keys: Tensor, count: int, first: int, step: int, slot: int) -> Tensor:
    """Rows (len(keys), count) of float32: the elements first, first + 1, ... of every key's stream.

    ``keys`` are pairs of 32-bit words as int64, on the device the numbers are for."""
    if not 0 <= first <= first + count <= NUMBERS:
        raise ValueError(f"numbers {first} to {first + count} of a stream that has {NUMBERS}")
    if not count:
        return torch.empty(len(keys), 0, dtype=torch.float32, device=keys.device)
    begin, end = first // TILE, -(-(first + count) // TILE)
    per = max(1, _CHUNK // TILE // max(1, len(keys)))
    tiles = [
        _tiles(keys, tile, min(tile + per, end), step, slot) for tile in range(begin, end, per)
    ]
    made = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)
    return made[:, first - begin * TILE :][:, :count]


def _tiles(keys: Tensor, begin: int, end: int, step: int, slot: int) -> Tensor:
    block = torch.arange(begin * LANES, end * LANES, device=keys.device)
    words = philox(block, slot, step & MASK, (step >> 32) & MASK, keys[:, :1], keys[:, 1:])
    pairs = [*_box_muller(words[0], words[1]), *_box_muller(words[2], words[3])]
    shape = len(keys), end - begin, LANES
    return torch.stack([p.view(shape) for p in pairs], dim=2).flatten(1)


def philox(
    c0: Tensor, c1: int, c2: int, c3: int, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds on 32-bit words kept in int64."""
    x0, x1, x2, x3 = c0, torch.full_like(c0, c1), torch.full_like(c0, c2), torch.full_like(c0, c3)
    for _ in range(10):
        high, low = x0 * MULTIPLIERS[0], x2 * MULTIPLIERS[1]
        x0, x1, x2, x3 = (
            ((low >> 32) & MASK) ^ x1 ^ k0,
            low & MASK,
            ((high >> 32) & MASK) ^ x3 ^ k1,
            high & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return x0, x1, x2, x3


def _box_muller(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """24 bits for the length; 24 bits for the angle within its octant, three others for the octant."""
    u = (a >> 8).to(torch.float32).mul_(2.0**-24).add_(2.0**-25)
    radius = u.log_().mul_(-2).sqrt_()
    t = (b.to(torch.int32) >> 8).to(torch.float32).add_(0.5).mul_(math.pi / 4 * 2.0**-23)
    sin, cos = t.sin(), t.cos()
    swap = (b & 1).bool()
    signs = [1 - ((b >> bit) & 1).to(torch.float32).mul_(2) for bit in (1, 2)]
    return (
        radius * torch.where(swap, sin, cos) * signs[0],
        radius * torch.where(swap, cos, sin) * signs[1],
    )
