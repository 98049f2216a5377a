"""Diagnoses: likely mistakes in a program, and what to write instead."""
