"""Books of a table: what its ops do, how long items take memory, and how much that is at each moment."""
