# SPDX-License-Identifier: Apache-2.0
"""The `ebpflb` command where the kernel does not tell this node's addresses.

Until the file that EBPFLB_TEST_ADDRESSES names is there.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

from ebpflb import node
from ebpflb.cli import main

if __name__ == "__main__":
    module: Any = node
    netlink, is_there = module._netlink, Path(os.environ["EBPFLB_TEST_ADDRESSES"]).exists

    def slow(*args: Any, **kwargs: Any) -> Any:
        if not is_there():
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        return netlink(*args, **kwargs)

    module._netlink = slow
    main()
