"""Meshes, context and axis rules; Expression to NamedSharding, and back."""
