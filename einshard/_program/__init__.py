"""The form of a program that a compiler or tracer gives, as one graph, and what it costs."""
