"""Training of Hugging Face models from the command line: `megatrain train`, `megatrain demo`."""
