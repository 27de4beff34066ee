"""Compiled evaluations, steps and VJPs. See README.md in this folder."""
