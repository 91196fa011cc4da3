"""The life of one snapshot.

`snapshotter.begin` takes Lightning's checkpoint, on every rank, at the end of a step.
`state_tree` flattens it into named tensors and a skeleton of everything else, which `meta` packs.
`shard_plan` says which rank writes which rows to which drive; `stripe_header` makes each such file safetensors.
`staging` copies buffers at once, and parameters and optimizer state behind the next forward and backward.
`snapshot.fence` returns when nothing more is read from live tensors: the weights may move.
`stripe_writer` hashes the chunks and writes them, one thread per drive, through `direct_io` and `buffer_pool`.
`commit` gathers every rank's report; the `manifest` is written last; one rename in `publish` shows the folder.
`figures` notes what that cost, and `cadence` fits the interval to it.
`retention` names the snapshots that may go, now that a newer one is durable.
`restore` reads it back, at another world size too; `layout` spells every file name.
FORMAT.md specifies every byte.
"""
