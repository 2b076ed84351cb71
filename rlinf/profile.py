"""The command ``python -m rlinf.profile +workflow=ppo``: measures what the stages of a workflow take on this hardware.

A profile is plain data, for plans that are made from it. It is kept for the same workflow, model, config and hardware,
or written to a file. Nothing is trained but what is thrown away afterwards.

Exit codes: 0 done; 1 a stage failed; 2 the config, data, model or placement is wrong; 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from rlinf.config import TrainConfig
from rlinf.errors import ConfigError, RlinfError


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    from rlinf.failure import RunFailed, interruption
    from rlinf.train import Terminated

    given = _parser().parse_intermixed_args(argv)

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        try:
            from rlinf.compose import compose

            _profile(compose(given.overrides), given.out, given.budget)
        except BaseException as error:
            raise (interruption(error) or error) from None
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as failure:
        first = failure.first
        others = f"\n({failure.others} more ranks failed after it)" if failure.others > 0 else ""
        print(f"error: {first.title}{'' if first.user else chr(10) + first.trace}{others}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Terminated:
        print("terminated", file=sys.stderr)
        return 143
    return 0


def _profile(cfg: TrainConfig, out: Path | None, budget_s: float | None) -> None:
    from rlinf.cluster import Cluster
    from rlinf.preflight import preflight
    from rlinf.scheduler.cache import keep
    from rlinf.scheduler.identity import kinds_of
    from rlinf.scheduler.profile import save_profile
    from rlinf.scheduler.profiler import profile
    from rlinf.scheduler.table import profile_lines
    from rlinf.train import load_graph

    if out is not None and not os.access(folder := out.absolute().parent, os.W_OK):
        raise ConfigError(f"--out {out}: the folder {folder} is not there, or cannot be written to")
    ready = preflight(cfg, load_graph)
    cluster = Cluster.connect(cfg.cluster, _say)
    try:
        if cluster.reaper is not None:
            cluster.reaper.remember()
        found = profile(ready, cfg.plan.budget_s if budget_s is None else budget_s, _say)
        places, _ = kinds_of(cluster.devices)
    finally:
        cluster.close()
    for line in ("", *profile_lines(found), ""):
        _say(line)
    if out is not None:
        save_profile(found, out)
        _say(f"profile      {out}")
    elif (path := keep(found, places, _say)) is not None:
        _say(f"profile      {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rlinf.profile",
        description="Measure what the stages of a workflow take on this hardware, for plans that are made from it.",
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", help="config as for rlinf.train: +workflow=ppo model=tiny ...")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the profile there, not among those kept for runs"
    )
    parser.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help="how long it may take (plan.budget_s by default)"
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected seconds, 0 or more")
    return value


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
