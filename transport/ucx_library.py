"""The border to UCXX: its core API, imported in the one way that works here.

UCX looks at its environment when its library is first loaded, and warns about every ``UCX_*`` variable that no
component reads, those that UCXX itself sets among them. Hence this module sets ``UCX_WARN_UNUSED_ENV_VARS`` first, and
every other module imports UCXX from here.
"""

from __future__ import annotations

import os

os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import ucxx._lib.libucxx as ucx
from ucxx._lib.arr import Array

__all__ = ["Array", "ucx"]
