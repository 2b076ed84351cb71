"""Errors a user can act on. Each message names what was found, what was expected, and what to change."""


class RlinfError(Exception):
    """Base of every error that is reported as a message rather than as a traceback."""


class ConfigError(RlinfError):
    """A key, value or combination of values in the config is wrong."""


class DataError(RlinfError):
    """A data source is missing, empty, malformed, or lacks a column."""


class ModelError(RlinfError):
    """A model directory or tokenizer cannot be used as asked."""


class WorkflowError(RlinfError):
    """A workflow was built wrongly: an unread field, two writers, a cycle, a stage that is none."""


class PlacementError(RlinfError):
    """The cluster cannot hold the placement that was asked for."""


class NeedsNewWorld(PlacementError):
    """A plan cannot be taken over by the ranks that run: it needs others, or other devices."""


class StartError(RlinfError):
    """A stage of the start stood still for longer than it may."""


class CheckpointError(RlinfError):
    """A checkpoint is incomplete, of another model, or cannot be written."""
