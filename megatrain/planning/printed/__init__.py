"""The printed forms of plans."""
