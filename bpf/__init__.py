"""The C sources, as data: installed as ``ebpflb.bpf`` so that the loader finds them anywhere.

Read them with ``importlib.resources.files("ebpflb.bpf")``. No Python lives here.
"""
