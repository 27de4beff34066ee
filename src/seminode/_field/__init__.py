"""The user's field: its state, its parameters, its determinism, and checks of what a user passes."""
