"""Meshes, contexts and axis rules. Converts expressions to NamedShardings and back."""
