"""The loop that takes steps, and everything a step is made of."""
