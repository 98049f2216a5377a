"""A traced program with the shardings that Shardy, XLA's own propagation, gives every value."""
