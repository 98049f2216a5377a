"""All small changes of the shardings of a program, ranked by the compiler's own propagation."""
