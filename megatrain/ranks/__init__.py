"""Several processes, the ranks of a process group, that train one model together: what passes between them."""
