"""Where a run's numbers and sample transcripts go. None of it can stop a run, and none of it holds a secret.

Read in this order:

- `redaction`: `redact`, for any config before it is written or sent;
- `files`: ``metrics.jsonl`` and ``samples.jsonl``, one line at a time, without doubles after a resume;
- `backends`: TensorBoard, Weights & Biases, MLflow, each a `Tracker`;
- `background`: a thread and a bounded queue, so that a slow tracker does not hold up a step;
- `trackers`: `check` before the run, `open_trackers` at its start, `Trackers.log` at every step.
"""

from rlinf.tracking.files import Samples
from rlinf.tracking.redaction import REDACTED, redact, redact_text
from rlinf.tracking.trackers import Tracker, Trackers, check, open_trackers

__all__ = ["REDACTED", "Samples", "Tracker", "Trackers", "check", "open_trackers", "redact", "redact_text"]
