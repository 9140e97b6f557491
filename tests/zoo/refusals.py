"""Cases that megatrain refuses today, by a part of the reason. A refused case that starts to work needs no entry."""

REFUSED: dict[str, tuple[str, ...]] = {
    # max_norm scales the rows it reads, in place, in the weight that is being trained.
    "writes into its parameter": ("embedding_bag",),
}
