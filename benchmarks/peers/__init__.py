"""Other systems that the benchmarks run beside ours, each in an environment of its own.

`environment` makes such an environment; every other file here is a script that runs inside one and prints one JSON
line.
"""
