"""Where gradients wait on the host, and when its ops run."""
