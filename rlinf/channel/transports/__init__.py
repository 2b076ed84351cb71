"""The ways that a payload goes from the member that put it to the one that took it; each in one file.

`base` has what they share: what a producer holds, what it offers, and how a consumer asks for it. Then:

- `inprocess`: the value itself, within a process.
- `shared`: memory of the producer, mapped. CPU, one host.
- `tcp`: a socket to the producer. CPU, between hosts.
- `gloo`: a process group of the two. CPU, between hosts.
- `ray_store`: Ray's object store. CPU, where nothing else goes.
- `cuda_ipc`: memory of the producer's GPU, mapped. One host.
- `nccl`: a process group of the two, from GPU to GPU.

`pair` makes process groups of two, for `gloo` and `nccl`.
"""
