"""Which plan a workflow runs under.

`shipped`: collocated, disaggregated and hybrid plans, and the choice among them by config.
"""
