# SPDX-License-Identifier: Apache-2.0
"""The `ebpflb` command as it is on a kernel before 6.6, which has no TCX.

There is no flag for it, since nobody should want it on a newer kernel.
"""

from __future__ import annotations

import functools
from typing import Any

from ebpflb import agent
from ebpflb.cli import main

if __name__ == "__main__":
    module: Any = agent
    module.EbpfOptions = functools.partial(module.EbpfOptions, tcx=False)
    main()
