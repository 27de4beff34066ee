"""Detection of leaves that are plain integrals, and the norm that leaves them out."""
