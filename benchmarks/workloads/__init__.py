"""Workflows and scorers that benchmarks run: each has another stage that most of an iteration goes to."""
