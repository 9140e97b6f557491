"""The effects of ops of the host, and of those that bring values and gradients from one device to another."""
