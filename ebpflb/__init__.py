"""ebpflb: Kubernetes Service load balancing in eBPF, in place of kube-proxy.

The version below is the only place that states it: the package's metadata reads it from here.
"""

__version__ = "0.1.0"
