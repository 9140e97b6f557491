"""`megatrain plan`: which machine trains a model, with which micro-batches, and how fast, before it is rented."""
