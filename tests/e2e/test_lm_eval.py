"""``lm-eval`` with local completions: its log-likelihoods are those of transformers, drafts or none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import Served

pytestmark = [pytest.mark.slow, pytest.mark.on_server("draft_model")]

torch.set_num_threads(1)

TOLERANCE = 1e-2
"""Of a log-likelihood, which sums up to ten tokens'; server and reference are float32."""

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid",
    "Egypt": "Cairo", "Norway": "Oslo", "Greece": "Athens", "Cuba": "Havana",
}  # fmt: skip

CHOICE = """\
task: capitals_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer: The capital of {{country}} is"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
UNTIL = """\
task: capitals_until
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: generate_until
test_split: test
doc_to_text: "Question: What is the capital of {{country}}?\\nAnswer: The capital of {{country}} is"
doc_to_target: "{{capital}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
ROLLING = """\
task: capitals_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "The capital of {{country}} is {{capital}}, and it is a large city."
metric_list: [{metric: word_perplexity}]
"""


@pytest.fixture(scope="module")
def reference(embedded_model: Path) -> tuple[Any, Any]:
    """Tokenizer and float32 model."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(embedded_model), model.eval()


def evaluate(
    served: Served, folder: Path
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """Runs the command as its users do, offline; results, and every sample, by task."""
    tasks = folder / "tasks"
    tasks.mkdir()
    others = list(CAPITALS.values())
    data = tasks / "capitals.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {
                    "country": country,
                    "capital": capital,
                    "choices": [capital, *(o for o in others if o != capital)][:4],
                }
            )
            + "\n"
            for country, capital in CAPITALS.items()
        )
    )
    for text in (CHOICE, UNTIL, ROLLING):
        name = text.split()[1]
        (tasks / f"{name}.yaml").write_text(text.replace("DATA", str(data)))
    arguments = (
        f"model={served.model},base_url={served.server.openai_url}/completions,"
        f"tokenizer={served.target},tokenizer_backend=huggingface,num_concurrent=4,max_retries=1,"
        f"max_length=1024"
    )
    run = subprocess.run(
        [
            str(Path(sys.executable).with_name("lm-eval")), "run", "--model", "local-completions",
            "--model_args", arguments, "--tasks", "capitals_choice,capitals_until,capitals_rolling",
            "--include_path", str(tasks), "--output_path", str(folder / "out"), "--log_samples",
        ],
        env={
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf"),
            "OPENAI_API_KEY": "none", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
        },
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    (results,) = (folder / "out").rglob("results_*.json")
    samples = {
        path.name.split("samples_")[1].rsplit("_", 1)[0]: [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in (folder / "out").rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


@torch.inference_mode()
def loglikelihood(model: Any, ids: list[int], first: int) -> tuple[float, bool]:
    """Of ``ids[first:]`` after what precedes them, and whether each is the likeliest."""
    logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    rows, tokens = logits[first - 1 : len(ids) - 1], torch.tensor(ids[first:])
    picked = rows.gather(1, tokens[:, None])[:, 0]
    return float(picked.sum()), bool((rows.argmax(-1) == tokens).all())


def test_lm_evals_figures_are_those_of_transformers(
    served: Served, reference: tuple[Any, Any], tmp_path: Path
) -> None:
    tokenizer, model = reference
    before = served.server.status()["acceptance"]["total"]
    results, samples = evaluate(served, tmp_path)

    assert len(samples["capitals_choice"]) == len(CAPITALS)
    worst = 0.0
    right = 0
    for sample in samples["capitals_choice"]:
        values = []
        for argument, response in zip(arguments_of(sample), sample["resps"], strict=True):
            context, continuation = argument
            whole = tokenizer.encode(context + continuation)
            value, greedy = loglikelihood(model, whole, len(tokenizer.encode(context)))
            got, got_greedy = float(response[0][0]), response[0][1] in (True, "True")
            worst = max(worst, abs(value - got))
            assert got_greedy == greedy
            values.append(value)
        right += values[0] == max(values)
    assert worst < TOLERANCE
    assert results["capitals_choice"]["acc,none"] == pytest.approx(right / len(CAPITALS))

    prefix = tokenizer.bos_token_id  # what lm-eval puts before a text that stands alone
    for sample in samples["capitals_rolling"]:
        ((text,),) = arguments_of(sample)
        value, _ = loglikelihood(model, [prefix, *tokenizer.encode(text)], 1)
        assert float(first_number(sample["resps"])) == pytest.approx(value, abs=TOLERANCE)

    for sample in samples["capitals_until"]:
        (argument,) = arguments_of(sample)
        ids = tokenizer.encode(argument[0], return_tensors="pt")
        out = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(out, skip_special_tokens=True).split("\n")[0].split(".")[0]
        assert sample["resps"][0][0] == text

    after = served.server.status()["acceptance"]["total"]
    assert after["emitted"] > before["emitted"]  # the generations were drafted for


def arguments_of(sample: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What each request of a sample was made of."""
    arguments = sample["arguments"]
    if isinstance(arguments, dict):  # gen_args_0: {arg_0: ..., arg_1: ...}
        return [tuple(one.values()) for one in arguments.values()]
    return [tuple(one) for one in arguments]


def first_number(value: Any) -> Any:
    while isinstance(value, list):
        value = value[0]
    return value


def test_logprobs_of_drafted_tokens_are_those_of_transformers(
    served: Served, reference: tuple[Any, Any]
) -> None:
    """Greedy and sampled, with accepted drafts among the tokens, by both routes that tell them."""
    tokenizer, model = reference
    prompt = "Once upon a time there was a little girl who lived near the sea."
    ids = tokenizer.encode(prompt)
    for temperature in (0.0, 1.0):
        answer = served.openai.completions.create(
            model=served.model, prompt=prompt, max_tokens=32, temperature=temperature, seed=7,
            logprobs=2, extra_body={"return_token_ids": True},
            extra_headers={"x-paceline-usage": "true"},
        )  # fmt: skip
        (choice,) = answer.choices
        out = choice.model_extra["token_ids"]
        versions = answer.usage.model_extra["paceline"]["versions"]
        assert sum(sum(v["accepted"]) for v in versions) > 0
        rows = score(model, ids + out)[len(ids) - 1 : -1]
        expected = rows.gather(1, torch.tensor(out)[:, None])[:, 0]
        assert choice.logprobs.token_logprobs == pytest.approx(expected.tolist(), abs=1e-3)
        for row, top in zip(rows, choice.logprobs.top_logprobs, strict=True):
            assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)


def test_logprobs_of_a_prompt_do_not_depend_on_max_tokens(
    served: Served, reference: tuple[Any, Any]
) -> None:
    tokenizer, model = reference
    prompt = "The capital of France is Paris, and the capital of Italy is Rome."
    ids = tokenizer.encode(prompt)
    expected = score(model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    for max_tokens in (0, 1, 8):
        answer = served.openai.completions.create(
            model=served.model, prompt=prompt, max_tokens=max_tokens, temperature=0.0, echo=True,
            logprobs=1,
        )  # fmt: skip
        logprobs = answer.choices[0].logprobs
        assert logprobs.token_logprobs[0] is None
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(expected, abs=1e-3)
        assert len(logprobs.tokens) == len(ids) + max_tokens


@torch.inference_mode()
def score(model: Any, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocabulary] log-probabilities."""
    return model(torch.tensor([ids])).logits[0].log_softmax(-1)
