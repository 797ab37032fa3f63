"""An adapter does what merging it into the weights would, and its requests and the others have the same bits in any company."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.adapter_files import read_adapter
from core.errors import InvalidInputError
from core.model.lora import build_adapter
from core.sampling_params import SamplingParams
from tests.support.lora_folders import ATTENTION, save_adapter, save_merged
from tests.unit.core.model.support import Driver, Request, random_prompt, save_llama
from tests.unit.core.model.test_batch_invariance import SHAPES

WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=100, logprobs=5, prompt_logprobs=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, shape in SHAPES.items():
        made[name] = tmp_path_factory.mktemp(name)
        save_llama(made[name], **shape)
    return made


@pytest.mark.parametrize(
    ("rank", "fields"),
    [
        (8, {}),
        (5, {"modules": ("q_proj", "v_proj")}),
        (16, {"modules": ("k_proj", "up_proj", "down_proj"), "use_rslora": True, "lora_alpha": 3}),
        (4, {"modules": ATTENTION, "skipped_layers": (0,)}),
    ],
)
def test_adapter_equals_weights_with_it_merged_in(
    folders: dict[str, Path], tmp_path: Path, rank: int, fields: dict[str, Any]
) -> None:
    base = folders["tiny"]
    adapter_folder = save_adapter(tmp_path / "adapter", base, rank=rank, **fields)
    merged, adapted = Driver(save_merged(tmp_path / "merged", base, adapter_folder)), Driver(base)
    adapter = adapted.load_adapter(adapter_folder)
    prompt = random_prompt(60, seed=1)
    expected = merged.run_alone(merged.add("a", prompt, WITH_LOGPROBS), 12, chunk=100)
    found = adapted.run_alone(adapted.add("a", prompt, WITH_LOGPROBS, adapter), 12, chunk=100)
    unadapted = adapted.run_alone(adapted.add("b", prompt, WITH_LOGPROBS), 12, chunk=100)
    assert found.output == expected.output
    assert found.output != unadapted.output  # the adapters are large enough to see
    torch.testing.assert_close(adapted.kv(found), merged.kv(expected), atol=1e-3, rtol=1e-4)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert abs(ours.logprob - theirs.logprob) < 1e-3


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.contiguous().view(integers), expected.contiguous().view(integers))


def _alone(driver: Driver, request: Request, num_output_tokens: int) -> tuple[Request, torch.Tensor]:
    ran = driver.run_alone(
        driver.add(f"alone-{request.request_id}", request.token_ids[: request.num_prompt_tokens], WITH_LOGPROBS, request.adapter),
        num_output_tokens,
        chunk=10_000,
    )
    kv = driver.kv(ran)
    driver.remove(ran)
    return ran, kv


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("shape", "seed"), [("tiny", 0), ("smollm2", 1), ("odd", 2)])
def test_mixed_batches_give_everyone_the_bits_of_being_alone(
    folders: dict[str, Path], tmp_path: Path, shape: str, seed: int, dtype: str
) -> None:
    """The references: base requests on a driver that knows no adapter, adapted ones each alone."""
    rng = random.Random(seed)
    adapters = [
        save_adapter(tmp_path / "a", folders[shape], rank=8, seed=1, size=0.03),
        save_adapter(tmp_path / "b", folders[shape], rank=3, seed=2, size=0.03, modules=("q_proj", "down_proj")),
        save_adapter(tmp_path / "c", folders[shape], rank=24, seed=3, size=0.03, modules=ATTENTION),
    ]
    together, plain, adapted = (Driver(folders[shape], dtype, num_blocks=400, seed=number) for number in range(3))
    names = ["", *(together.load_adapter(folder) for folder in adapters)]
    assert names[1:] == [adapted.load_adapter(folder) for folder in adapters]
    lengths = (1, 5, 33, 120, 257)
    requests = [
        together.add(f"r{i}", random_prompt(rng.choice(lengths), seed=10 + i), WITH_LOGPROBS, names[i % len(names)])
        for i in range(8)
    ]
    num_output_tokens = 4
    while running := [request for request in requests if len(request.output) < num_output_tokens]:
        batch = rng.sample(running, rng.randint(1, len(running)))
        together.step([(r, min(len(r.token_ids) - r.num_computed_tokens, rng.choice((1, 2, 7, 60, 300)))) for r in batch])
    for request in requests:
        expected, expected_kv = _alone(adapted if request.adapter else plain, request, num_output_tokens)
        assert _same_bits(together.kv(request), expected_kv), f"{request.request_id} with {request.adapter or 'no adapter'}"
        assert request.output == expected.output
        assert request.logprobs == expected.logprobs
        assert request.prompt_logprobs == expected.prompt_logprobs


def test_adapter_that_is_dropped_stays_with_the_requests_that_have_it(folders: dict[str, Path], tmp_path: Path) -> None:
    """A step may still be in flight for a request that has ended, when its adapter makes room for another."""
    driver = Driver(folders["tiny"])
    adapter = driver.load_adapter(save_adapter(tmp_path / "a", folders["tiny"]))
    prompt = random_prompt(20, seed=3)
    expected = driver.run_alone(driver.add("before", prompt, adapter=adapter), 4, chunk=20)
    request = driver.run_alone(driver.add("a", prompt, adapter=adapter), 2, chunk=20)
    driver.runner.adapters.drop(adapter)
    assert driver.run_alone(request, 4, chunk=20).output == expected.output
    with pytest.raises(KeyError):
        driver.runner.adapters.find(adapter)


DOWN = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({DOWN: None}, r"layers\.1\.q_proj: got 'lora_B alone'; allowed: both lora_A and lora_B"),
        ({DOWN: (7, 96)}, r"got '\[7, 96\] of torch.float32'; allowed: \[8, 96\]"),
        ({DOWN.replace("1", "2"): (8, 96)}, r"layers\.2\.self_attn.*; allowed: .* with N below 2"),
        ({DOWN.replace("lora_A", "lora_magnitude_vector"): (96,)}, r"lora_magnitude_vector.*; allowed: base_model"),
        ({"base_model.model.lm_head.lora_A.weight": (8, 96)}, r"lm_head.*; allowed: .* MODULE one of q_proj"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, tuple[int, ...] | None], message: str
) -> None:
    folder = save_adapter(tmp_path / "a", folders["tiny"], modules=("q_proj",))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, shape in changes.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    architecture = Driver(folders["tiny"], num_blocks=8).description.architecture
    with pytest.raises(InvalidInputError, match=message):
        build_adapter(read_adapter(str(folder)), architecture, torch.float32, torch.device("cpu"))


def test_folder_that_changed_since_it_was_named_and_a_rank_that_is_too_high_are_not_loaded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    store = Driver(folders["tiny"], num_blocks=8).runner.adapters
    changed, wide = tmp_path / "changed", save_adapter(tmp_path / "wide", folders["tiny"], rank=65)
    before = read_adapter(str(save_adapter(changed, folders["tiny"], seed=1))).fingerprint.hex()
    save_adapter(changed, folders["tiny"], seed=2)
    for adapter, folder, message in (
        (before, changed, "they have changed since"),
        (read_adapter(str(wide)).fingerprint.hex(), wide, "r: got 65; allowed: at most 64"),
    ):
        store.start_load(adapter, str(folder))
        while not (loads := store.poll_loads()):
            time.sleep(0.001)
        assert loads[0].adapter == adapter and message in loads[0].error


def test_any_number_of_threads_gives_an_adapter_the_same_bits(folders: dict[str, Path], tmp_path: Path) -> None:
    driver = Driver(folders["smollm2"])
    adapter = driver.load_adapter(save_adapter(tmp_path / "a", folders["smollm2"], rank=8, size=0.03))
    prompt = random_prompt(150, seed=5)
    found = []
    try:
        for num_threads, chunk in itertools.product((1, 2, 3), (83, 150)):
            torch.set_num_threads(num_threads)
            found.append(driver.run_alone(driver.add(f"{num_threads}-{chunk}", prompt, WITH_LOGPROBS, adapter), 2, chunk))
    finally:
        torch.set_num_threads(1)
    for other in found[1:]:
        assert _same_bits(driver.kv(other), driver.kv(found[0])), other.request_id
        assert other.logprobs == found[0].logprobs


@pytest.mark.parametrize("use_rslora", [False, True])
def test_folder_written_by_peft_where_peft_is_installed_equals_peft(tmp_path: Path, use_rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    model = save_llama(tmp_path / "model")
    config = peft.LoraConfig(
        r=6, lora_alpha=9, target_modules="all-linear", use_rslora=use_rslora, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    driver = Driver(tmp_path / "model")
    prompt = random_prompt(40, seed=1)
    adapter = driver.load_adapter(tmp_path / "adapter")
    request = driver.run_alone(driver.add("a", prompt, WITH_LOGPROBS, adapter), 8, chunk=100)
    with torch.inference_mode():
        logprobs = adapted(torch.tensor([request.token_ids])).logits[0].log_softmax(-1)
    expected = logprobs[len(prompt) - 1 : -1]
    assert request.output == expected.argmax(-1).tolist()
    for ours, row in zip(request.logprobs, expected, strict=True):
        assert abs(ours.logprob - float(row[ours.token_id])) < 1e-3
