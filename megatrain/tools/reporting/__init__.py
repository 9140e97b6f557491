"""Reports: a step in pictures and figures, as planned and as measured; `megatrain.report` is public."""
