"""The command: ``python -m rlinf.train +workflow=ppo``. Config -> workflow -> plan -> run.

Exit codes: 0 done; 1 the run failed; 2 the config, data, model or placement is wrong (nothing was started, or nothing
was changed); 130 interrupted; 143 terminated.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from rlinf.compose import CONFIG_MODULE, explain, groups, register, spelled, typed
from rlinf.config import TrainConfig
from rlinf.errors import ConfigError, RlinfError, WorkflowError

if TYPE_CHECKING:
    from rlinf.m2flow.graph import Graph


class Terminated(BaseException):
    """SIGTERM: leave as on Ctrl-C, ending every process of the run."""


def load_graph(cfg: TrainConfig) -> Graph:
    """Import the workflow's function, call it with the config, and check what it built.

    Raises:
        ConfigError: no workflow was chosen, or its import path leads nowhere.
        WorkflowError: the function does not return a `Workflow`, or builds a wrong one.
    """
    from rlinf.m2flow.graph import Workflow

    if not cfg.workflow.target:
        raise ConfigError(
            f"no workflow was chosen: add one of {', '.join('+workflow=' + w for w in groups()['workflow'])}, "
            "or workflow.target=my_module.my_flow for one of your own"
        )
    target = cfg.workflow.target.replace(":", ".")
    module_name, _, name = target.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise ConfigError(
                f"workflow.target={cfg.workflow.target}: there is no module {error.name!r} here or installed "
                f"(searched from {os.getcwd()}); expected my_module.my_flow"
            ) from error
        raise
    except ValueError as error:
        raise ConfigError(f"workflow.target={cfg.workflow.target}: expected module.function") from error
    function = getattr(module, name, None)
    if not callable(function):
        found = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module_name]
        raise ConfigError(f"workflow.target: {module_name} has no function {name!r}; it has {', '.join(found)}")
    flow = function(cfg)
    if not isinstance(flow, Workflow):
        raise WorkflowError(f"{cfg.workflow.target} must return a Workflow, it returned {type(flow).__name__}")
    return flow.build()


def train(cfg: TrainConfig) -> Any:
    """Run a config from Python, as the command does. Returns a `rlinf.runner.Outcome` (``None`` on a dry run).

    Raises:
        RlinfError: something is wrong that its message tells how to mend.
        RunFailed: a worker failed; the first failure is named.
    """
    from rlinf.preflight import preflight

    ready = preflight(cfg, load_graph)
    if cfg.dry_run:
        print("\n".join(ready.lines()))
        return None
    from rlinf.runner import run

    return run(ready)


def _arguments(argv: Sequence[str]) -> list[str]:
    return ["dry_run=true" if argument == "--dry-run" else spelled(argument) for argument in argv]


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rlinf.failure import RunFailed, interruption

    # Let errors out of Hydra as they are: it would print its own text and hide the cause.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[1:] = _arguments(sys.argv[1:] if argv is None else argv)
    register()
    signal.signal(signal.SIGTERM, _terminate)

    ended: list[BaseException] = []

    def job(node: Any) -> None:
        # Hydra prints a line of its own about an error that passes through it; this one goes around it.
        try:
            train(typed(node))
        except BaseException as error:
            ended.append(interruption(error) or error)

    try:
        hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_MODULE}", config_name="config")(job)()
        if ended:
            raise ended[0]
    except RlinfError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    except RunFailed:
        return 1  # said by the runner
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Terminated:
        print("terminated", file=sys.stderr)
        return 143
    return 0


if __name__ == "__main__":
    sys.exit(main())
