"""Moving state: from buffers laid out one way to buffers laid out another, on real processes.

In reading order:

- `peers`: what ranks tell one another besides the state: small values, with a deadline that names who is missing.
- `copying`: boxes from flat buffers to flat buffers.
- `shared`: one host: others read the state where it lies, one hop, no messages.
- `messages`: between hosts: numbered rounds over a torch process group (Gloo; NCCL on GPUs).
- `ipc`: between GPUs of one host.
- `choice`: which of these serves a pair of ranks.
- `reshard`: `Reshard`, a plan carried out in two phases.
"""
