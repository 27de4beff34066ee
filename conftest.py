"""Settings for tests and doctests."""

# Before pytest loads a module for its doctests: it would make a second copy of one that is not there yet, whose classes
# are not those of the package.
import seminode  # noqa: F401
import seminode_lab  # noqa: F401
