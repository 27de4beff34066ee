"""Drop-in replacements of other libraries: their functions, arguments and defaults, run by seminode.

    import seminode.compat.torchdiffeq as torchdiffeq

Nothing here computes: arguments are mapped to those of [`solve`][seminode.solve]. `python -m seminode.compat SCRIPT`
runs a script with the libraries replaced.
"""

from __future__ import annotations

from ._replacing import installed

__all__ = ["installed"]
