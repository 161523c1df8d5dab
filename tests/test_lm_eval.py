"""An exported model in EleutherAI's evaluation harness, on tasks of this machine, against our own model's numbers."""

import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="the harness needs pip install -r requirements-extras.txt")
pytest.importorskip("transformers", reason="exporting needs pip install -r requirements-extras.txt")

from test_export import exported, run  # noqa: F401

from data.tokenizer import load_tokenizer
from model.decoding import greedy_decode
from scripts.shared.runs import load_run

QUESTIONS = ["abc def", "hg", "aaa bbb ccc ddd" * 30, "f e d c"]  # the third is longer than the training's texts
CHOICES = [" ab", " hgfe"]


@pytest.mark.slow
@torch.no_grad()
def test_scores_of_the_harness_equal_our_model(run, exported, tmp_path, monkeypatch):  # noqa: F811
    import lm_eval

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tokenizer = load_tokenizer(run.parent / "data")
    _, gpt = load_run(run, torch.device("cpu"))

    # 1. Our model's log probabilities of the choices, and its answers, of which the first is replaced.
    log_p, answers = [], []
    for question in QUESTIONS:
        before = tokenizer.encode(question)
        for choice in CHOICES:
            tokens = torch.tensor([before + tokenizer.encode(choice)])
            losses = gpt(tokens[:, :-1], tokens[:, 1:], per_token=True)
            log_p.append(-losses[0, len(before) - 1 :].sum().item())
        answers.append(tokenizer.decode(greedy_decode(gpt, torch.tensor([before]), 8)[0].tolist()))
    answers[0] = "another"

    # 2. Two tasks of the harness.
    docs = [dict(question=q, choices=CHOICES, answer=a) for q, a in zip(QUESTIONS, answers)]
    path = tmp_path / "docs.jsonl"
    path.write_text("\n".join(map(json.dumps, docs)))
    common = dict(
        dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(path))), test_split="test",
        doc_to_text="{{question}}",
    )
    choice = common | dict(
        task="choice", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target=0,
        target_delimiter="", metric_list=[dict(metric="acc")],
    )
    words = common | dict(
        task="words", output_type="generate_until", doc_to_target="{{answer}}",
        metric_list=[dict(metric="exact_match")],
        generation_kwargs=dict(until=["zzz"], max_gen_toks=8, do_sample=False),
    )
    arguments = f"pretrained={exported},trust_remote_code=True"
    found = lm_eval.simple_evaluate("hf", model_args=arguments, tasks=[choice, words], batch_size=1, device="cpu")
    samples = sorted(found["samples"]["choice"], key=lambda sample: sample["doc_id"])
    responses = [response[0] for sample in samples for response in sample["filtered_resps"]]
    assert responses == pytest.approx(log_p, abs=1e-4)
    accuracy = torch.tensor(log_p).view(4, 2).argmax(dim=1).eq(0).double().mean().item()
    assert found["results"]["choice"]["acc,none"] == accuracy
    assert found["results"]["words"]["exact_match,none"] == 0.75
