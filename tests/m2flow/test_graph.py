"""The macro flow: dependencies follow from fields, and mistakes are found while the workflow is built."""

from __future__ import annotations

import pytest
import torch

from rlinf.batch import Batch
from rlinf.errors import WorkflowError
from rlinf.m2flow.graph import EVALUATE, TRAIN, Graph, Node, Workflow
from rlinf.m2flow.stage import StageSpec, Unit
from rlinf.worker import Worker, stage


class Prompts:
    writes = ("prompt", "answer")

    def setup(self) -> None: ...

    def next_batch(self) -> Batch:
        return Batch({"row_id": torch.arange(2), "prompt": ["a", "b"], "answer": ["x", "y"]})

    def state(self) -> dict:
        return {}

    def load_state(self, state: dict) -> None: ...


class Generator(Worker):
    @stage(reads=("prompt",), writes=("response",), unit=Unit.GROUP, expands=True)
    def generate(self, batch: Batch) -> Batch: ...

    def receive_weights(self, version, publications) -> None: ...


class Scorer(Worker):
    uses_device = False

    @stage(reads=("response", "answer"), writes=("rewards",))
    def score(self, batch: Batch) -> Batch: ...


class Judge(Worker):
    @stage(reads=("response",), writes=("opinion",))
    def judge(self, batch: Batch) -> Batch: ...


class Policy(Worker):
    @stage(reads=("response", "rewards"), optional=("opinion",), updates=True, whole=True)
    def train(self, batch: Batch) -> None: ...

    def publish_weights(self, target, inline): ...


def flow_of_four(name: str = "four") -> Workflow:
    flow = Workflow(name)
    generator, scorer = flow.worker(Generator), flow.worker(Scorer)
    judge, policy = flow.worker(Judge), flow.worker(Policy)
    samples = generator.generate(flow.source(Prompts()))
    samples = scorer.score(samples)
    samples = judge.judge(samples)
    policy.train(samples)
    flow.sync(policy, generator)
    return flow


def test_branches_are_independent_by_their_fields_not_by_the_order_of_lines() -> None:
    graph = flow_of_four().build()
    assert graph.independent("scorer.score", "judge.judge")
    assert not graph.independent("scorer.score", "policy.train")


def test_an_edge_carries_just_what_its_consumer_reads() -> None:
    graph = flow_of_four().build()
    names = {node.index: node.name for node in graph.nodes}
    edges = {(names[e.source], names[e.target]): e.fields for e in graph.edges}
    assert edges["generator.generate", "scorer.score"] == ("answer", "response")
    assert edges["generator.generate", "judge.judge"] == ("response",)
    assert edges["scorer.score", "policy.train"] == ("rewards",)
    assert edges["judge.judge", "policy.train"] == ("opinion",)


def test_an_expanding_stage_hands_on_only_the_input_fields_that_somebody_reads() -> None:
    graph = flow_of_four().build()
    generate = next(node for node in graph.nodes if node.name == "generator.generate")
    assert generate.carried == ("answer",)
    assert set(generate.reads) == {"prompt", "answer"}


def test_optional_fields_are_read_where_somebody_writes_them() -> None:
    flow = Workflow("w")
    samples = flow.worker(Scorer).score(flow.worker(Generator).generate(flow.source(Prompts())))
    flow.worker(Policy).train(samples)
    train = flow.build().nodes[-1]
    assert set(train.reads) == {"response", "rewards"}


def test_a_field_that_nobody_writes_is_an_error_naming_the_nearest() -> None:
    class Misspelt(Worker):
        @stage(reads=("respons",))
        def look(self, batch: Batch) -> None: ...

    flow = Workflow("w")
    samples = flow.worker(Generator).generate(flow.source(Prompts()))
    with pytest.raises(WorkflowError, match=r"misspelt\.look reads 'respons'.*did you mean 'response'"):
        flow.worker(Misspelt).look(samples)


def test_two_writers_of_a_field_are_an_error_naming_both() -> None:
    flow = Workflow("w")
    scorer = flow.worker(Scorer)
    samples = scorer.score(flow.worker(Generator).generate(flow.source(Prompts())))
    with pytest.raises(WorkflowError, match=r"'rewards' has two writers: scorer\.score and scorer\.score"):
        scorer.score(samples)


def test_joining_streams_with_two_writers_of_a_field_is_an_error() -> None:
    flow = Workflow("w")
    first, second = flow.worker(Scorer, name="first"), flow.worker(Scorer, name="second")
    samples = flow.worker(Generator).generate(flow.source(Prompts()))
    with pytest.raises(WorkflowError, match=r"'rewards' has two writers: first\.score and second\.score"):
        flow.join(first.score(samples), second.score(samples))


def test_a_method_that_is_no_stage_is_an_error() -> None:
    flow = Workflow("w")
    with pytest.raises(WorkflowError, match=r"Generator\.genrate is not a stage; did you mean 'generate'"):
        flow.worker(Generator).genrate(flow.source(Prompts()))
    with pytest.raises(WorkflowError, match="setup is not a stage"):
        flow.worker(Scorer).setup(flow.source(Prompts()))


def test_a_cycle_without_a_loop_is_an_error_naming_the_nodes() -> None:
    spec = StageSpec("s", reads=())
    nodes = (Node(0, "a.s", "a", spec, {"y": 1}, ("x",)), Node(1, "b.s", "b", spec, {"x": 0}, ("y",)))
    with pytest.raises(WorkflowError, match=r"cycle without a loop: .*a\.s"):
        Graph("w", {}, nodes, ())


def test_evaluation_is_apart_from_training() -> None:
    flow = flow_of_four()
    generator, scorer = flow._workers["generator"], flow._workers["scorer"]
    from rlinf.m2flow.graph import WorkerHandle

    held_out = WorkerHandle(flow, generator).generate(flow.source(Prompts()))
    flow.evaluate(WorkerHandle(flow, scorer).score(held_out))
    graph = flow.build()
    assert [n.name for n in graph.phase(EVALUATE)] == ["host.source5", "generator.generate#2", "scorer.score#2"]
    assert "policy.train" in {n.name for n in graph.phase(TRAIN)}


def test_training_inside_evaluation_and_evaluation_feeding_training_are_errors() -> None:
    flow = Workflow("w")
    samples = flow.worker(Scorer).score(flow.worker(Generator).generate(flow.source(Prompts())))
    trained = flow.worker(Policy).train(samples)
    flow.evaluate(samples)
    with pytest.raises(WorkflowError, match=r"policy\.train \(train\) reads from"):
        flow.build()
    flow.evaluate(trained)
    del trained


def test_sync_needs_a_sender_and_a_receiver_of_weights() -> None:
    flow = Workflow("w")
    generator, scorer = flow.worker(Generator), flow.worker(Scorer)
    with pytest.raises(WorkflowError, match=r"Generator does not define publish_weights\(\)"):
        flow.sync(generator, scorer)


def test_a_stream_of_another_workflow_is_an_error() -> None:
    other = Workflow("other")
    prompts = other.source(Prompts())
    with pytest.raises(WorkflowError, match="belongs to another workflow, 'other'"):
        Workflow("w").worker(Generator).generate(prompts)


def test_a_worker_without_a_stage_in_use_is_an_error() -> None:
    flow = Workflow("w")
    flow.worker(Generator).generate(flow.source(Prompts()))
    flow.worker(Scorer)
    with pytest.raises(WorkflowError, match="no stage of scorer is used"):
        flow.build()


def test_two_workers_of_one_name_are_an_error() -> None:
    flow = Workflow("w")
    flow.worker(Generator)
    with pytest.raises(WorkflowError, match="already is a worker 'generator'"):
        flow.worker(Generator)


def test_only_a_stage_that_updates_and_writes_nothing_may_start_late() -> None:
    class Early(Worker):
        @stage(reads=("response",), writes=("x",), updates=True, starts=1)
        def train(self, batch: Batch) -> Batch: ...

    class Looks(Worker):
        @stage(reads=("response",), starts=1)
        def look(self, batch: Batch) -> None: ...

    for worker, name in ((Early, "train"), (Looks, "look")):
        flow = Workflow("w")
        getattr(flow.worker(worker), name)(flow.worker(Generator).generate(flow.source(Prompts())))
        with pytest.raises(WorkflowError, match=rf"{name} would start after 1 iterations"):
            flow.build()


def test_a_version_counts_the_iterations_since_the_first_stage_that_updates() -> None:
    class Late(Worker):
        @stage(reads=("response",), updates=True, starts=lambda cfg: cfg["k"])
        def train(self, batch: Batch) -> None: ...

    flow = Workflow("w")
    samples = flow.worker(Generator).generate(flow.source(Prompts()))
    flow.worker(Late, {"k": 2}).train(samples)
    graph = flow.build()
    assert [graph.version("late", done) for done in range(5)] == [0, 0, 0, 1, 2]


def test_an_option_that_a_stage_does_not_have_is_an_error_when_the_workflow_is_built() -> None:
    class Options(Worker):
        @stage(reads=("prompt",), writes=("x",))
        def use(self, batch: Batch, *, temperature: float = 1.0) -> Batch: ...

    flow = Workflow("w")
    worker, prompts = flow.worker(Options), flow.source(Prompts())
    with pytest.raises(WorkflowError, match=r"options\.use has no option 'temprature'; did you mean 'temperature'"):
        worker.use(prompts, temprature=0.5)
    with pytest.raises(WorkflowError, match=r"generator\.generate has no option 'top_k'; it has none"):
        flow.worker(Generator).generate(prompts, top_k=5)
    used = worker.use(prompts, temperature=0.5)
    assert "x" in used.fields
