# SPDX-License-Identifier: Apache-2.0
"""The `ebpflb` command on a node whose netfilter cannot be told anything.

Until the file that EBPFLB_TEST_NETFILTER names is there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ebpflb.cli import main
from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import datapath
from ebpflb.datapath.ebpf.netfilter import Netfilter
from ebpflb.errors import DatapathError


class NoNetfilter(Netfilter):
    """The real one, once it works."""

    def ensure(self) -> list[Difference]:
        if not Path(os.environ["EBPFLB_TEST_NETFILTER"]).exists():
            raise DatapathError("run", "nft", hint="neither nft nor iptables is there")
        return super().ensure()


if __name__ == "__main__":
    module: Any = datapath
    module.Netfilter = NoNetfilter
    main()
