"""What every page of a report is made of: a frame, its style and script, tables and texts without marks."""
