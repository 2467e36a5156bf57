"""Layouts from the order of their axes, as engines write them down (``LBHNC``, ``BNHD``, ...). Decides strides and
offsets of dense pools; must never know which engine asks, nor where a region lies.

Letters, outermost first: ``L`` layer, ``B`` block, ``K`` part (keys, then values), ``H`` head, ``N`` token in the
block, ``D`` dim. ``L`` and ``K`` may be missing: then every layer, or every part, has a region of its own.

| engine | axes |
|---|---|
| vLLM 0.32 ``LBHNC``, ``LBNHC``, ``BLHNC`` (C: K and V side by side) | ``LBHNKD``, ``LBNHKD``, ``BLHNKD`` |
| vLLM 0.32 on CPU (``CPU_ATTN``, isa vec) | ``LBHKND`` with ``transposed=("k",)`` |
| vLLM before, per layer ``[2, blocks, tokens, heads, dims]`` | ``KBNHD`` |
| SGLang, per layer and part ``[slots, heads, dims]`` | ``BNHD`` |
| MLA, per layer ``[blocks, tokens, latent]`` | ``BNHD`` with ``parts=("latent",)``, one head |
| kvxfer's own engine (``BL2HTD``) | ``BLKHND`` |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvxfer.errors import InvalidArgumentError
from kvxfer.layout.kv_layout import KvLayout, KvPart


def layout_from_axes(
    axes: str,
    *,
    layers: Iterable[int],
    block_tokens: int,
    block_count: int,
    heads: int,
    dims: int | Sequence[int],
    dtype_bytes: int,
    parts: Sequence[str] = ("k", "v"),
    head_offset: int = 0,
    total_heads: int = 0,
    regions: Sequence[int] = (0,),
    offset: int = 0,
    transposed: Iterable[str] = (),
    packing: str = "",
) -> KvLayout:
    """A dense layout, no gap anywhere.

    ``dims`` is one number, or one for each part. ``regions`` names the regions in the order of the axes that are
    missing (layer, then part): one where none is missing, else a layer's regions side by side. The cache begins at
    ``offset`` bytes of each. The parts in ``transposed`` store the two innermost axes, which must be ``ND``, the other
    way round.
    Raises InvalidArgumentError naming the field.
    """
    layers, transposed = tuple(layers), frozenset(transposed)
    if set(axes) | {"L", "K"} != set("LBKHND") or len(set(axes)) != len(axes):
        raise InvalidArgumentError(f"axes: {axes!r} must be B, H, N, D and perhaps L, K, each once")
    widths = (dims,) * len(parts) if isinstance(dims, int) else tuple(dims)
    if len(widths) != len(parts):
        raise InvalidArgumentError(f"dims: {len(widths)} numbers for {len(parts)} parts")
    if transposed and (not transposed <= set(parts) or not axes.endswith("ND")):
        raise InvalidArgumentError(f"transposed: {sorted(transposed)} must be parts, and the axes must end in ND")

    columns = len(parts) if "K" not in axes else 1
    rows = len(layers) if "L" not in axes else 1
    if len(regions) != rows * columns:
        raise InvalidArgumentError(f"regions: {rows * columns} are needed for axes {axes!r}, not {len(regions)}")

    sizes = {"L": len(layers), "B": block_count, "H": heads, "N": block_tokens}
    strides: list[dict[str, int]] = [{} for _ in parts]
    inner = [dtype_bytes] * len(parts)
    part_offsets = [0] * len(parts)
    for axis in reversed(axes):
        if axis == "K":
            part_offsets = [sum(inner[:part]) for part in range(len(parts))]
            inner = [sum(inner)] * len(parts)
            continue
        for part, width in enumerate(widths):
            strides[part][axis] = inner[part]
            inner[part] *= width if axis == "D" else sizes[axis]
    for part, name in enumerate(parts):
        if name in transposed:
            strides[part].update(N=dtype_bytes, D=dtype_bytes * block_tokens)

    return KvLayout(
        parts=tuple(
            KvPart(name, width, dtype_bytes, stride["B"], stride["N"], stride["H"], stride["D"])
            for name, width, stride in zip(parts, widths, strides, strict=True)
        ),
        layers=layers,
        regions=tuple(
            tuple(regions[(row % rows) * columns + part % columns] for part in range(len(parts)))
            for row in range(len(layers))
        ),
        offsets=tuple(
            tuple(offset + part_offsets[part] + row * strides[part].get("L", 0) for part in range(len(parts)))
            for row in range(len(layers))
        ),
        block_tokens=block_tokens,
        block_count=block_count,
        heads=heads,
        head_offset=head_offset,
        total_heads=total_heads,
        packing=packing,
    )
