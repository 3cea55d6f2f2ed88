"""A small reasoning model of our own: its task, its training, its export."""
