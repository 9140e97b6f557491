"""What people run: the commands, reports, and the comparison with eager."""
