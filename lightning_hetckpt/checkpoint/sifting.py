"""What a checkpoint of a chain reads and compares: nothing of what nobody trains, rows where rows change one by one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from lightning_hetckpt.checkpoint.chain import Base, Frozen
from lightning_hetckpt.checkpoint.chunk_plan import ChunkPlan
from lightning_hetckpt.checkpoint.layout import delta_name
from lightning_hetckpt.checkpoint.save_layout import SaveLayout
from lightning_hetckpt.checkpoint.sieve import Sieve
from lightning_hetckpt.checkpoint.staging import Pour
from lightning_hetckpt.checkpoint.step_guard import version_of
from lightning_hetckpt.checkpoint.stripe_header import stamp_header


def sifted(
    pours: Sequence[Pour],
    layout: SaveLayout,
    rows: Mapping[str, int],
    base: Base | None,
    untouched: Collection[str],
    snapshot_id: str,
) -> list[Pour]:
    """The same stripes with a sieve each; of one that is compared with a base, what changed is written.

    Args:
        rows: names of tensors whose rows change one by one, and the bytes of a row.
        untouched: names of tensors that are as they were in `base`.
    """
    found = []
    for one in pours:
        cuts = layout.cuts(one.stripe, rows)
        if base is None:
            found.append(replace(one, sieve=Sieve(cuts)))
            continue
        found.append(
            replace(
                one,
                chunks=_moving(one, untouched) if untouched else one.chunks,
                header=stamp_header(one.header, base.full_id),
                path=one.path.parent / delta_name(one.stripe.file, snapshot_id),
                sieve=Sieve(cuts, base.hashes[one.stripe.file]),
                only_changes=True,
            )
        )
    return found


def frozen_now(live: Mapping[str, Tensor], frozen: Collection[Tensor]) -> Frozen:
    """How the frozen ones among the live tensors look now."""
    if not frozen:
        return ()
    # With the shape: a tensor that is trained may begin where a frozen view of the same memory does.
    places = {(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in frozen}
    return tuple(
        (name, tensor.data_ptr(), version_of(tensor))
        for name, tensor in live.items()
        if not tensor.is_inference() and (tensor.data_ptr(), tensor.shape, tensor.stride()) in places
    )


def untouched_since(base: Base | None, now: Frozen, verify_unchanged: int) -> set[str]:
    """Names of the frozen tensors that seem to be as they were in `base`; none where they are to be compared."""
    if base is None or base.length % verify_unchanged == 0:
        return set()
    return {name for name, _, _ in {*now} & {*base.frozen}}


def rows_of(live: Mapping[str, Tensor], sparse: Collection[Tensor]) -> dict[str, int]:
    """The bytes of a row of each live tensor that is sparse, by name."""
    addresses = {tensor.data_ptr(): tensor.shape for tensor in sparse if tensor.dim() > 1}
    return {
        name: tensor.nbytes // len(tensor)
        for name, tensor in live.items()
        if addresses and addresses.get(tensor.data_ptr()) == tensor.shape and tensor.nbytes
    }


def _moving(one: Pour, untouched: Collection[str]) -> list[ChunkPlan]:
    """The buffers in which there is anything else than untouched tensors."""
    moves = [piece.name not in untouched for piece in one.stripe.pieces]
    return [
        chunk
        for chunk in one.chunks
        if any(map(moves.__getitem__, (*chunk.small.pieces, *chunk.large.pieces)))
    ]
