"""Requests and steps of transformers' `generate`, in scripts that say nothing of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from engines import Told  # noqa: E402
from smallllama import small_llama  # noqa: E402

from xsp import serving  # noqa: E402
from xsp_collectors.generating import Generation  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def utils() -> Any:
    """The module of `generate`, which takes seconds to import: not where tests are only collected."""
    found = pytest.importorskip("transformers.generation.utils")
    if not hasattr(found.GenerationMixin, "_sample"):
        pytest.skip("this transformers has another generate")
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    return small_llama()


@pytest.fixture
def told(utils: Any) -> Iterator[Told]:
    log, collector = Told(), Generation()
    original = utils.GenerationMixin.__dict__["_sample"]
    serving.attach(log)
    collector.open()
    yield log
    collector.close()
    assert utils.GenerationMixin.__dict__["_sample"] is original
    serving.detach(log)
    log.close()
    assert list(collector.notes()) == []
    assert serving._sinks == []


def generate(model: Any, rows: int = 3, length: int = 8, **options: Any) -> Any:
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (rows, length))
    mask = torch.ones_like(ids)
    mask[1:, :5] = 0
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, **options)


def test_each_row_is_a_request_and_each_call_of_the_model_a_step(model: Any, told: Told) -> None:
    generate(model)
    told.drain()
    told.drain()
    assert [step.parts[0].phase for _, step in told.steps] == ["prefill", *["decode"] * 5]
    assert [step.computed for _, step in told.steps] == [24, *[3] * 5]
    assert [(each.prompt_tokens, each.output_tokens, each.status) for each in told.accounts] == [
        (8, 6, "ok"), (3, 6, "ok"), (3, 6, "ok"),
    ]  # fmt: skip
    for account in told.accounts:
        assert sum(account.parts) == account.latency_ns
        assert account.steps == 6
    assert told.notes == []


@pytest.fixture(scope="module")
def draft() -> Any:
    return small_llama(seed=7, hidden=16)


@pytest.mark.parametrize("returned", [1, 3])
def test_beams_are_one_request_whose_steps_compute_a_token_of_each(model: Any, told: Told, returned: int) -> None:
    result = generate(model, num_beams=3, num_return_sequences=returned)
    assert result.shape[0] == 3 * returned
    told.drain()
    told.drain()
    assert [(each.prompt_tokens, each.output_tokens, each.status) for each in told.accounts] == [
        (8, 6, "ok"), (3, 6, "ok"), (3, 6, "ok"),
    ]  # fmt: skip
    assert len(told.steps) == 6, "none after the last token"
    assert [part.tokens for part in told.steps[0][1].parts] == [24, 9, 9]
    assert {part.tokens for _, step in told.steps[1:] for part in step.parts} == {3}
    assert [step.computed for _, step in told.steps] == [72, *[9] * 5]
    for account in told.accounts:
        assert sum(account.parts) == account.latency_ns
    assert told.notes == []


@pytest.mark.parametrize("by", ["model", "lookup"])
def test_a_draft_is_part_of_the_step_that_checks_it(model: Any, draft: Any, told: Told, by: str) -> None:
    options = {"assistant_model": draft} if by == "model" else {"prompt_lookup_num_tokens": 3}
    result = generate(model, rows=1, max_new_tokens=12, **options)
    told.drain()
    told.drain()
    [account] = told.accounts
    assert account.output_tokens == result.shape[1] - 8 == 12
    assert (account.prompt_tokens, account.status) == (8, "ok")
    assert account.steps == len(told.steps) <= 12
    assert [step.parts[0].phase for _, step in told.steps] == ["prefill", *["decode"] * (account.steps - 1)]
    assert sum(step.parts[0].new or 0 for _, step in told.steps) == 12
    assert sum(account.parts) == account.latency_ns
    assert told.notes == []


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"num_return_sequences": 2, "do_sample": True}, {"num_beams": 2},
     {"num_beams": 2, "do_sample": True}],
)  # fmt: skip
def test_tokens_are_those_without_it(model: Any, options: dict[str, Any]) -> None:
    expected = generate(model, **options)
    log, collector = Told(), Generation()
    serving.attach(log)
    collector.open()
    try:
        assert torch.equal(generate(model, **options), expected)
    finally:
        collector.close()
        serving.detach(log)
        log.close()
    assert len(log.accounts) == 3 * options.get("num_return_sequences", 1)


def test_tokens_of_a_drafted_text_are_those_without_it(model: Any, draft: Any, told: Told) -> None:
    expected = generate(model, rows=1)
    assert torch.equal(generate(model, rows=1, assistant_model=draft), expected)


def test_a_call_with_beams_that_fails_ends_its_step_and_its_requests(model: Any, told: Told) -> None:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise ZeroDivisionError("mine")

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        generate(model, num_beams=2)
    handle.remove()
    told.drain()
    told.drain()
    assert [account.status for account in told.accounts] == ["error:ZeroDivisionError"] * 3
    assert [step.status for _, step in told.steps] == ["ok", "ok", "error:ZeroDivisionError"]
    generate(model, rows=1)
    told.drain()
    told.drain()
    assert told.accounts[-1].status == "ok"


def test_a_row_that_has_ended_is_not_served_and_ends_with_its_batch(model: Any, told: Told) -> None:
    reference = generate(model)
    told.drain()
    told.drain()
    told.steps.clear()
    told.accounts.clear()
    ends = int(reference[0, 10])  # the third token of the first row
    result = generate(model, eos_token_id=ends, max_new_tokens=12)
    told.drain()
    told.drain()
    lasted = [
        next((place + 1 for place, token in enumerate(row[8:].tolist()) if token == ends), result.shape[1] - 8)
        for row in result
    ]
    assert [account.output_tokens for account in told.accounts] == lasted
    assert len(told.steps) == max(lasted)
    assert [len(step.parts) for _, step in told.steps] == [
        sum(tokens > place for tokens in lasted) for place in range(max(lasted))
    ]


def test_a_call_that_fails_ends_its_requests_and_another_thread_has_its_own_steps(model: Any, told: Told) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("mine")

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        generate(model, rows=1)
    handle.remove()
    told.drain()
    told.drain()
    assert [account.status for account in told.accounts] == ["error:ZeroDivisionError"]
    threads = [threading.Thread(target=generate, args=(model,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told.drain()
    told.drain()
    assert [account.status for account in told.accounts] == ["error:ZeroDivisionError", *["ok"] * 6]
    assert told.notes == []


def test_a_library_without_the_method_is_left_alone_with_a_note(monkeypatch: pytest.MonkeyPatch, utils: Any) -> None:
    monkeypatch.delattr(utils.GenerationMixin, "_sample")
    collector = Generation()
    collector.open()
    collector.close()
    [note] = collector.notes()
    assert "transformers has no GenerationMixin._sample" in note


def test_arguments_of_another_form_run_as_without(model: Any, monkeypatch: pytest.MonkeyPatch, utils: Any) -> None:
    monkeypatch.setattr(utils.GenerationMixin, "_sample", lambda self, *_, **__: "own")
    collector = Generation()
    collector.open()
    try:
        assert model._sample(1, 2) == "own"
    finally:
        collector.close()
    [note] = collector.notes()
    assert "`generate` are incomplete" in note
