"""Twenty prompts of 1 to 2,000 tokens (English, Chinese, code, emoji), and how transformers continues them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from core.model_files import resolve_model

MODEL = "smollm2"
LENGTHS = (1, 2, 5, 9, 15, 16, 17, 31, 32, 33, 64, 100, 129, 200, 300, 450, 640, 1000, 1500, 2000)
NUM_OUTPUT_TOKENS = 64

_TEXTS = (
    "The lighthouse keeper wrote in his log that the storm had passed, and that ship number {i} was safe in the harbour. ",
    "春天来了，第{i}只燕子飞过河流，孩子们在田野里唱歌，老人坐在树下讲述从前的故事。",
    "def step_{i}(state, token):\n    if token in state:\n        return state[token] + {i}\n    return None\n\n",
    "🚀 Launch {i}: 🌍➡️🌕 all systems go 👩‍🚀✅ telemetry {i}% 📡 … 🎉🔥 ",
)


@cache
def tokenizer() -> Tokenizer:
    """The model's own tokenizer."""
    return Tokenizer.from_file(str(resolve_model(MODEL) / "tokenizer.json"))


@cache
def token_prompts() -> list[list[int]]:
    """LENGTHS[i] tokens of running text each; no two share their first block."""
    prompts = []
    for index, length in enumerate(LENGTHS):
        text, line = f"{index}. ", 0
        while True:
            text += "".join(_TEXTS[index % len(_TEXTS)].format(i=index * 1000 + line) for _ in range(20))
            line += 1
            token_ids: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
            if len(token_ids) >= length:
                prompts.append(token_ids[:length])
                break
    return prompts


@cache
def transformers_model() -> Any:
    """The same weights in float32."""
    return AutoModelForCausalLM.from_pretrained(resolve_model(MODEL), dtype=torch.float32)


def transformers_next_logprobs(known: tuple[int, ...]) -> list[tuple[int, float]]:
    """What transformers says comes next: the likeliest tokens with their log-probabilities, by one plain forward pass."""
    with torch.inference_mode():
        logits = transformers_model()(torch.tensor([known]), logits_to_keep=1).logits[0, 0]
    best = torch.topk(torch.log_softmax(logits, dim=-1), 64)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


def transformers_beams(prompt: list[int], width: int, max_tokens: int) -> list[tuple[list[int], float]]:
    """(output tokens, cumulative log-probability) of transformers' own beam search, which no eos token ends."""
    with torch.inference_mode():
        found = transformers_model().generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=max_tokens,
            do_sample=False,
            length_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens: list[list[int]] = found.sequences[:, len(prompt) :].tolist()
    return list(zip(tokens, (found.sequences_scores * max_tokens).tolist(), strict=True))


def transformers_continues(outputs: list[list[int]]) -> list[list[int]]:
    """What transformers, greedy in float32 from the same weights, says at each position of prompt + output.

    One forward over the given text instead of one per token: where the answer equals `outputs`, so does greedy generation, by
    induction over the positions; where it does not, the first difference is the first wrong token.
    """
    model = transformers_model()
    answers: list[list[int]] = []
    with torch.inference_mode():
        for prompt, output in zip(token_prompts(), outputs, strict=True):
            logits = model(torch.tensor([prompt + output]), logits_to_keep=len(output) + 1).logits[0]
            answers.append(logits[:-1].argmax(-1).tolist())
    return answers
