# The agent's image. bcc and libbpf are Debian's; all else is a venv that sees them.
FROM debian:12-slim AS build
RUN apt-get update \
 && apt-get install -y --no-install-recommends python3-venv \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY constraints.txt ./
RUN python3 -m venv /tools \
 && /tools/bin/pip install --no-cache-dir -c constraints.txt build setuptools
COPY pyproject.toml setup.cfg README.md LICENSE ./
COPY LICENSES LICENSES
COPY bpf bpf
COPY ebpflb ebpflb
RUN /tools/bin/python -m build --no-isolation --wheel \
 && python3 -m venv --system-site-packages /opt/ebpflb \
 && /opt/ebpflb/bin/pip install --no-cache-dir -c constraints.txt dist/*.whl

FROM debian:12-slim
# linux-libc-dev: the headers that the BPF programs include. nftables, iptables: our rules in
# netfilter, in whichever the node uses; iptables too for kernels without what
# the eBPF mode needs.
RUN apt-get update \
 && apt-get install -y --no-install-recommends \
    python3-bpfcc libbpf1 linux-libc-dev iproute2 nftables iptables \
 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/ebpflb /opt/ebpflb
ENTRYPOINT ["/opt/ebpflb/bin/ebpflb"]
CMD ["run"]
