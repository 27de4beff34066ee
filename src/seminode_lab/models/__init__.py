"""Models of the paper in their published sizes, and the double pendulum."""
