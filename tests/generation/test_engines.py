"""Both engines, held to the same behaviour; one of each is shared by the module, since vLLM takes seconds to load."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlinf.errors import ConfigError, ModelError
from rlinf.generation import Engine, build_engine
from rlinf.vps.publication import Publication
from rlinf.vps.pull import Pull
from rlinf.vps.space import LayoutError
from tests.generation import oracle

ENDS = tuple(range(8, 72))  # of 267 about equally likely tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oracle.build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return oracle.load(model_dir)


@pytest.fixture(scope="module", params=["hf", "hf-batch-invariant", "vllm"])
def engine(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Engine]:
    name = request.param.removesuffix("-batch-invariant")
    spec = oracle.spec(model_dir, eos_ids=ENDS, batch_invariant=name != request.param)
    with ThreadPoolExecutor(1) as thread:  # where a Ray actor builds it: not the main thread
        built = thread.submit(build_engine, name, spec).result()
    yield built
    built.close()
    built.close()


@pytest.fixture
def restored(engine: Engine, model: Any) -> Iterator[None]:
    yield
    oracle.deliver(engine, dict(model.named_parameters()))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_logprobs_are_those_of_the_distribution_that_was_sampled(
    engine: Engine, model: Any, temperature: float
) -> None:
    given = oracle.requests(samples=3)
    done = oracle.run(engine, given, temperature)
    assert done.keys() == {request.key for request in given}
    for request in given:
        completion = done[request.key]
        expected = oracle.logprobs(model, request.prompt, list(completion.tokens), temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)


def test_greedy_tokens_are_those_of_transformers(engine: Engine, model: Any) -> None:
    for request in oracle.requests(samples=1):
        completion = oracle.run(engine, [request])[request.key]
        assert list(completion.tokens) == oracle.greedy(model, request.prompt, 12, ENDS)


def test_every_end_id_stops_and_stays_in_the_response(engine: Engine) -> None:
    given = oracle.requests(samples=8)
    done = oracle.run(engine, given, temperature=1.0, limit=4)
    for completion in done.values():
        ends = [token in ENDS for token in completion.tokens]
        assert not any(ends[:-1])
        assert completion.truncated is not ends[-1]
        assert len(completion.tokens) == 4 or ends[-1]
        assert len(completion.tokens) == len(completion.logprobs)
    assert len({completion.tokens[-1] for completion in done.values() if not completion.truncated}) > 2
    assert any(completion.truncated for completion in done.values())


def test_samples_do_not_depend_on_what_they_are_batched_with(engine: Engine) -> None:
    given = oracle.requests(samples=4)
    together = oracle.run(engine, given, temperature=1.0)
    permuted = oracle.run(engine, given[::-1], temperature=1.0)
    alone = {}
    for row in range(len(oracle.prompts())):
        alone.update(oracle.run(engine, oracle.requests(samples=4, rows=[row]), temperature=1.0))
    for key, completion in together.items():
        assert list(completion.tokens) == list(permuted[key].tokens) == list(alone[key].tokens)


def test_samples_of_a_group_differ_from_one_another(engine: Engine) -> None:
    done = oracle.run(engine, oracle.requests(samples=8, rows=[1]), temperature=1.0)
    assert len({tuple(completion.tokens) for completion in done.values()}) >= 6


def test_sampled_frequencies_are_the_probabilities(engine: Engine, model: Any) -> None:
    prompt = oracle.prompts()[0]
    given = [type(oracle.requests(1)[0])(key, 0, prompt, 77 + key) for key in range(300)]
    done = oracle.run(engine, given, temperature=1.0, limit=1)
    drawn = torch.tensor([completion.tokens[0] for completion in done.values()])
    with torch.no_grad():
        expected = torch.softmax(model(torch.tensor([prompt])).logits[0, -1], -1)
    found = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    # Total variation: 300 draws from the true distribution stay far below this.
    assert (found - expected).abs().sum() / 2 < 0.3


def test_works_off_the_main_thread(engine: Engine) -> None:
    expected = oracle.run(engine, oracle.requests(samples=2), temperature=1.0)
    found: dict[int, Any] = {}
    thread = threading.Thread(target=lambda: found.update(oracle.run(engine, oracle.requests(samples=2), 1.0)))
    thread.start()
    thread.join()
    assert found == expected


def test_goes_on_after_a_consumer_left_early(engine: Engine) -> None:
    expected = oracle.run(engine, oracle.requests(samples=4), temperature=1.0)
    left = engine.generate(oracle.requests(samples=4), temperature=1.0, max_new_tokens=12)
    next(left)
    left.close()
    assert oracle.run(engine, oracle.requests(samples=4), temperature=1.0) == expected


@pytest.mark.usefixtures("restored")
def test_after_a_sync_the_new_weights_speak_and_nothing_cached_of_the_old(engine: Engine, model: Any) -> None:
    given = oracle.requests(samples=1)
    before = oracle.run(engine, given)  # fills the prefix cache
    weights = oracle.other(model, seed=3)
    oracle.deliver(engine, weights)
    changed = copy.deepcopy(model)
    changed.load_state_dict(weights, strict=False)
    changed.tie_weights()
    assert changed.lm_head.weight is changed.model.embed_tokens.weight
    after = oracle.run(engine, given)
    assert [c.tokens for c in after.values()] != [c.tokens for c in before.values()]
    for request in given:
        completion = after[request.key]
        assert list(completion.tokens) == oracle.greedy(changed, request.prompt, 12, ENDS)
        expected = oracle.logprobs(changed, request.prompt, list(completion.tokens), 0.0)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-3, rtol=0)


@pytest.mark.usefixtures("restored")
def test_syncs_follow_one_another(engine: Engine, model: Any) -> None:
    given = oracle.requests(samples=1)
    expected = oracle.run(engine, given)
    for seed, ranks, cut, common in ((1, 1, 0, False), (2, 2, 0, False), (3, 3, 1, False), (4, 3, 1, True)):
        oracle.deliver(engine, oracle.other(model, seed), ranks, cut, common)
    oracle.deliver(engine, dict(model.named_parameters()), ranks=2, cut=1)
    assert [c.tokens for c in oracle.run(engine, given).values()] == [c.tokens for c in expected.values()]


@pytest.mark.usefixtures("restored")
def test_samples_in_flight_go_on_with_new_weights(engine: Engine, model: Any) -> None:
    newer = copy.deepcopy(model)
    weights = oracle.other(model, seed=5)
    newer.load_state_dict(weights, strict=False)
    newer.tie_weights()
    given = {request.key: request for request in oracle.requests(samples=4)}
    done, switched = {}, 0
    running = engine.generate(list(given.values()), temperature=1.0, max_new_tokens=12)
    for completion in running:
        if not done:
            oracle.deliver(engine, weights)
        done[completion.key] = completion
    assert done.keys() == given.keys()
    for key, completion in done.items():
        found, tokens = torch.tensor(completion.logprobs), list(completion.tokens)
        old, new = (oracle.logprobs(m, given[key].prompt, tokens, 1.0) for m in (model, newer))
        first = int(((found - old).abs() < 2e-3).long().cumprod(0).sum())  # tokens that the old weights made
        switched += 0 < first < len(tokens)
        if type(engine).__name__ == "VllmEngine":  # which reads again, with the new weights, what there is so far
            torch.testing.assert_close(found[first:], new[first:], atol=2e-3, rtol=0)
    if not engine._spec.batch_invariant or type(engine).__name__ == "VllmEngine":
        assert switched  # else it has no group under way while it hands on another


@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
def test_a_request_that_vllm_loses_or_gives_up_is_an_error_not_a_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = engine._engine  # type: ignore[attr-defined]
    given = oracle.requests(samples=2)
    expected = oracle.run(engine, given)
    add = inner.add_request
    with monkeypatch.context() as patch:
        patch.setattr(inner, "add_request", lambda key, *rest: None if key == str(given[-1].key) else add(key, *rest))
        with pytest.raises(
            ModelError, match=rf"no answer to 1 of {len(given)} requests, among them row {given[-1].key}"
        ):
            oracle.run(engine, given)
    step = inner.step

    def gives_up() -> list[Any]:
        outputs = step()
        for output in outputs:
            output.outputs[0].finish_reason = "error"
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(inner, "step", gives_up)
        with pytest.raises(ModelError, match=r"gave row \d+ up \(error\)"):
            oracle.run(engine, given)
    assert oracle.run(engine, given) == expected


def test_sleeping_and_waking_changes_nothing(engine: Engine) -> None:
    expected = oracle.run(engine, oracle.requests(samples=2), temperature=1.0)
    engine.sleep()
    engine.wake()
    assert oracle.run(engine, oracle.requests(samples=2), temperature=1.0) == expected
    assert engine.nbytes() > 0


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def _left_out(weights: dict[str, torch.Tensor]) -> None:
    del weights[K_PROJ]


def _too_many(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.0.lora_A"] = torch.zeros(3)


def _misshapen(weights: dict[str, torch.Tensor]) -> None:
    weights[K_PROJ] = weights[K_PROJ][:1]


def _integers(weights: dict[str, torch.Tensor]) -> None:
    weights[K_PROJ] = weights[K_PROJ].to(torch.int32)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [(_left_out, K_PROJ), (_too_many, "layers.0.lora_A"), (_misshapen, K_PROJ), (_integers, "int32")],
)
def test_weights_of_another_model_are_refused_by_name_and_nothing_has_changed(
    engine: Engine, model: Any, spoil: Any, named: str
) -> None:
    given = oracle.requests(samples=1)
    expected = oracle.run(engine, given)
    weights = oracle.other(model, seed=5)
    spoil(weights)
    with pytest.raises(LayoutError, match=named):
        oracle.deliver(engine, weights, ranks=2)
    assert oracle.run(engine, given) == expected


def elsewhere(publication: Publication) -> Publication:
    """As it comes from another host."""
    assert publication.inline is not None
    handle = replace(publication.handle, host="another")
    return replace(publication, handle=handle, inline=publication.inline.copy())


@pytest.mark.parametrize(("away", "common"), [(False, False), (True, False), (False, True)])
@pytest.mark.usefixtures("restored")
def test_a_source_publishes_again_and_again(engine: Engine, model: Any, away: bool, common: bool) -> None:
    given = oracle.requests(samples=1)
    first, second = oracle.other(model, seed=3), oracle.other(model, seed=4)
    source = oracle.Source(first, ranks=2, cut=1, common=common)
    found = []
    for weights in (first, second, first):
        published = source.publish(weights, inline=away)
        engine.load_weights([elsewhere(each) for each in published] if away else published)
        found.append([(list(c.tokens), list(c.logprobs)) for c in oracle.run(engine, given).values()])
    assert found[0] == found[2] != found[1]


def test_a_source_that_has_ended_leaves_an_engine_with_the_weights_that_it_has(engine: Engine, model: Any) -> None:
    given = oracle.requests(samples=1)
    expected = oracle.run(engine, given)
    source = oracle.Source(weights := oracle.other(model, seed=5), ranks=2)
    publications = source.publish(weights)
    gone = replace(publications[1], handle=replace(publications[1].handle, pid=2**22 + 1))
    with pytest.raises(LayoutError, match="has it ended"):
        engine.load_weights([publications[0], gone])
    assert oracle.run(engine, given) == expected


def test_what_was_changed_after_it_was_published_is_refused_by_name(engine: Engine, model: Any) -> None:
    given = oracle.requests(samples=1)
    oracle.deliver(engine, dict(model.named_parameters()))
    expected = oracle.run(engine, given)
    source = oracle.Source(weights := oracle.other(model, seed=6), ranks=2)
    publications = source.publish(weights, verify=True)
    source.flip(rank=1)
    with pytest.raises(LayoutError, match=r"box from \[.*\] is not what source rank 1 holds") as found:
        engine.load_weights(publications)
    assert any(name in str(found.value) for name in weights)
    assert oracle.run(engine, given) == expected  # it goes on with the weights that it has


@pytest.mark.usefixtures("restored")
def test_weights_that_are_verified_are_taken_over(engine: Engine, model: Any) -> None:
    for seed in (7, 8):  # the first sync of an engine reloads all, later ones write in place
        source = oracle.Source(weights := oracle.other(model, seed=seed), ranks=2)
        engine.load_weights(source.publish(weights, verify=True))
        newer = copy.deepcopy(model)
        newer.load_state_dict(weights, strict=False)
        newer.tie_weights()
        (request,) = oracle.requests(samples=1, rows=[1])
        assert list(oracle.run(engine, [request])[request.key].tokens) == oracle.greedy(newer, request.prompt, 12, ENDS)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.v_proj.weight"])
def test_what_is_lost_on_the_way_is_named_and_the_engine_speaks_no_more(
    engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    source = oracle.Source(weights := oracle.other(model, seed=9), ranks=2)
    engine.load_weights(source.publish(weights, verify=True))
    weights = oracle.other(model, seed=10)
    run, number = Pull.run, source._space.index[name]

    def loses(self: Pull, sources: Any, targets: Any, tensor: int) -> None:
        before = {buffer: flat.clone() for buffer, flat in targets.items() if tensor == number}
        run(self, sources, targets, tensor)
        for buffer, flat in before.items():
            targets[buffer].copy_(flat)

    with monkeypatch.context() as patch:
        patch.setattr(Pull, "run", loses)
        with pytest.raises(LayoutError, match=rf"{re.escape(name)}.*is not what source ranks \[0, 1\] published"):
            engine.load_weights(source.publish(weights, verify=True))
    with pytest.raises(ModelError, match="failed half-way"):
        oracle.run(engine, oracle.requests(samples=1))


# The last that uses the engines: it leaves them useless, as it should.
def test_an_engine_that_fails_half_way_through_a_sync_speaks_no_more(
    engine: Engine, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    oracle.deliver(engine, weights := dict(model.named_parameters()), ranks=2)
    monkeypatch.setattr(Pull, "run", fails)
    with pytest.raises(MemoryError):
        oracle.deliver(engine, weights, ranks=2)
    with pytest.raises(ModelError, match="failed half-way"):
        oracle.run(engine, oracle.requests(samples=1))


def test_an_unknown_engine_is_an_error_that_names_the_known_ones(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"'sglang'.*'hf', 'vllm'"):
        build_engine("sglang", oracle.spec(model_dir))
