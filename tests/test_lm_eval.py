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


@pytest.mark.slow
@torch.no_grad()
def test_scores_of_the_harness_equal_our_model(run, exported, tmp_path, monkeypatch):  # noqa: F811
    import lm_eval

    for name, value in dict(HF_HOME=tmp_path, HF_HUB_OFFLINE=1, HF_DATASETS_OFFLINE=1).items():
        monkeypatch.setenv(name, str(value))
    tokenizer, (_, gpt) = load_tokenizer(run.parent / "data"), load_run(run, torch.device("cpu"))

    def log_probability(question, choice):
        before, after = tokenizer.encode(question), tokenizer.encode(choice)
        tokens = torch.tensor([before + after])
        losses = gpt(tokens[:, :-1], tokens[:, 1:], per_token=True)
        return -losses[0, len(before) - 1 :].sum().item()

    def answer(question):
        tokens = torch.tensor([tokenizer.encode(question)])
        return tokenizer.decode(greedy_decode(gpt, tokens, 8)[0].tolist())

    questions = ["abc def", "hg", "aaa bbb ccc ddd " * 30, "f e d c"]  # the third is longer than the training's texts
    docs = [dict(question=q.strip(), choices=[" ab", " hgfe"]) for q in questions]
    for number, doc in enumerate(docs):
        doc["answer"] = answer(doc["question"]) if number else "another"
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, docs)))
    common = dict(dataset_path="json", dataset_kwargs=dict(data_files=dict(test=str(tmp_path / "docs.jsonl"))))
    common |= dict(test_split="test", doc_to_text="{{question}}")
    choice = dict(task="choice", output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target=0)
    choice |= dict(target_delimiter="", metric_list=[dict(metric="acc")])
    generation = dict(task="words", output_type="generate_until", doc_to_target="{{answer}}")
    generation |= dict(metric_list=[dict(metric="exact_match")])
    generation |= dict(generation_kwargs=dict(until=["zzz"], max_gen_toks=8, do_sample=False))
    found = lm_eval.simple_evaluate(
        model="hf", model_args=f"pretrained={exported},trust_remote_code=True", 
        tasks=[common | choice, common | generation], batch_size=1, device="cpu",
    )  # fmt: skip
    assert found["results"]["words"]["exact_match,none"] == 0.75
    ours = [[log_probability(doc["question"], choice) for choice in doc["choices"]] for doc in docs]
    samples = sorted(found["samples"]["choice"], key=lambda sample: sample["doc_id"])
    for expected, sample in zip(ours, samples, strict=True):
        assert [response[0] for response in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-4)
    assert found["results"]["choice"]["acc,none"] == sum(a > b for a, b in ours) / 4
