"""When the updates of a training step run, and which of several ranks makes them."""
