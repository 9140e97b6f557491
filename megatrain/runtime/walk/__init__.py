"""A walk: the model's own code runs, without gradients, and its state comes to the device as torch calls read it."""
