"""Controls X(t) of a controlled differential equation."""
