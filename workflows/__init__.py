"""Workflows, one a file: a function from the config to a `rlinf.Workflow`, readable as a paper's figure."""
