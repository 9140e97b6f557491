"""A linear head and its loss, computed in chunks of rows."""
