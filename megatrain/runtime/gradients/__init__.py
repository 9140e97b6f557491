"""Gradients of parameters: where they flow, how they add up, where they land on the host, and who takes them."""
