"""Changes of a program: one class for each kind, which applies itself to a trace."""
