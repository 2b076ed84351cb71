"""The roles, one a file. Each is a `rlinf.Worker` that says which fields its stages read and write.

`rollout` makes samples, `reward` scores them, `reference` and `critic` add log-probabilities and values, `actor` and
`critic` learn from them.
"""
