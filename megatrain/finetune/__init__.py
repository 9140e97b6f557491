"""Fine-tuning from the command line: `megatrain train`."""
