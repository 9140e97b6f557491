"""How a pass changes a captured graph: nodes are added and replaced, patterns are found, the result is compared."""
