"""Plans next to a plan: other options, larger batches, and what would make a refused step fit."""
