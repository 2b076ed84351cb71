"""Hydra's config groups. The schema that they fill is `rlinf.config`; docs/config.md lists every key."""
