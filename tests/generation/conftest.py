import torch

torch.set_num_threads(1)  # a tiny model gains nothing from more, and threads that wait for one another lose
