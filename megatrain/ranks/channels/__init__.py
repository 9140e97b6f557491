"""Channels: memory or collectives through which gradients go from rank to rank."""
