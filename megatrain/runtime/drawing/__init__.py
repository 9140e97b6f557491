"""Random numbers: what a forward draws, and the generators that it draws from."""
