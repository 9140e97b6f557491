"""What tables of devices to which blocks are dealt have in common."""
