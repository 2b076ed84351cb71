"""Which plan a workflow runs under.

`collocated`: every worker group on all devices, one after the other. It is the one planner there is.
"""
