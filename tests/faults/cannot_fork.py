"""A fork server that imports this can start no worker."""

from __future__ import annotations

import errno

from tests.kit.faults import refuse

refuse("clone", errno.EAGAIN)
