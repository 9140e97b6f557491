"""One block at a time: the runner of its template, its kernels, and its autograd graph."""
