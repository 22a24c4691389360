# SPDX-License-Identifier: Apache-2.0
"""The `ebpflb` command where the kernel does not tell this node's addresses.

Until the file that EBPFLB_TEST_ADDRESSES names is there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from ebpflb import netlink, node
from ebpflb.cli import main


class SlowNetlink:
    """The module, but for one function that the kernel does not do yet."""

    def __getattr__(self, name: str) -> Any:
        return getattr(netlink, name)

    def opened(self, **options: Any) -> Any:
        if not Path(os.environ["EBPFLB_TEST_ADDRESSES"]).exists():
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return netlink.opened(**options)


if __name__ == "__main__":
    module: Any = node
    module.netlink = SlowNetlink()
    main()
