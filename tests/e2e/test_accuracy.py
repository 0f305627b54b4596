"""`planc accuracy`: the served plan answers the harness's requests with the model's own log probabilities."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from planc.cli import main
from planc.runtime import harness

# Stands where lm_eval would: sends the requests of its `local-completions` model, and keeps what came back.
ASKS = """
import json, sys, urllib.request
args = dict(a.split("=", 1) for a in sys.argv[sys.argv.index("--model_args") + 1].split(","))
out = sys.argv[sys.argv.index("--output_path") + 1]
def ask(**fields):
    body = {"model": args["model"], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1, "echo": True, **fields}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer "}
    request = urllib.request.Request(args["base_url"], json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))
prompts = [[5, 9, 200, 17], [31, 32], list(range(100, 190))]
alone = [ask(prompt=[p]) for p in prompts]
found = {"argv": sys.argv, "prompts": prompts, "batch": ask(prompt=prompts), "alone": alone}
open(out, "w").write(json.dumps(found))
"""


def accuracy(*args: object) -> object:
    return CliRunner().invoke(main, ["accuracy", *map(str, args)], prog_name="planc")


def test_log_probabilities_are_the_models(plan, model, tmp_path: Path, monkeypatch) -> None:
    """The very requests of lm_eval, without it: batches of token ids, echo, one token more than is asked for."""
    for name in harness.NEEDS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "lm_eval" / "__main__.py").write_text(ASKS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")
    monkeypatch.setattr(harness, "find_spec", lambda name: name)
    out = tmp_path / "out.json"
    done = accuracy(plan("llama", "f32"), "--tasks", "any", "--limit", "7", "--batch-size", "4", "--output", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [found["argv"][found["argv"].index(flag) + 1] for flag in ("--limit", "--batch_size")] == ["7", "4"]
    truth = AutoModelForCausalLM.from_pretrained(model("llama"), dtype=torch.float32).eval()
    for index, ids in enumerate(found["prompts"]):
        with torch.no_grad():
            rows = truth(torch.tensor([ids])).logits[0].log_softmax(-1)
        scores = found["batch"]["choices"][index]["logprobs"]
        assert scores == found["alone"][index]["choices"][0]["logprobs"]
        assert len(scores["token_logprobs"]) == len(ids) + 1
        want = [rows[at, token].item() for at, token in enumerate(ids[1:])]
        assert scores["token_logprobs"][1:-1] == pytest.approx(want, abs=1e-4)
        best = rows.max(-1).values.tolist()
        assert [max(top.values()) for top in scores["top_logprobs"][1:]] == pytest.approx(best, abs=1e-4)


@pytest.mark.skipif(any(find_spec(name) is None for name in harness.NEEDS), reason="lm_eval is not installed")
def test_lm_eval_runs_a_task_of_a_folder(plan, tmp_path: Path) -> None:
    questions = [{"question": f"{n} and", "choices": [" a", " bee"], "answer": n % 2} for n in range(6)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    files = {"data_files": {"test": f"{tmp_path}/q.jsonl"}}
    task = {
        "task": "tiny_choice", "dataset_path": "json", "dataset_kwargs": files,
        "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (tmp_path / "tiny_choice.yaml").write_text(json.dumps(task))
    out = tmp_path / "out"
    done = accuracy(
        plan("llama", "f32"), "--tasks", "tiny_choice", "--include-path", tmp_path, "--output", out, "--limit", 4
    )
    assert done.exit_code == 0, done.output
    (results,) = out.rglob("results*.json")
    found = json.loads(results.read_text())
    assert 0 <= found["results"]["tiny_choice"]["acc,none"] <= 1
    assert found["n-samples"]["tiny_choice"]["effective"] == 4


def test_what_cannot_run_is_refused(plan, tmp_path: Path, monkeypatch) -> None:
    path = plan("llama", "f32")
    monkeypatch.setattr(harness, "NEEDS", ("json", "no_such_harness"))
    missing = accuracy(path, "--tasks", "any")
    assert missing.exit_code == 1
    assert "needs no_such_harness; install it with: pip install 'lm_eval[api]' transformers" in missing.output
    monkeypatch.setattr(harness, "NEEDS", ())
    assert accuracy(tmp_path, "--tasks", "any").exit_code == 1
    for flags in (("--tasks", ","), ("--tasks", "any", "--limit", 0), ("--tasks", "any", "--batch-size", -1)):
        assert accuracy(path, *flags).exit_code == 2
    failed = accuracy(path, "--tasks", "no_such_task_of_any_harness")
    assert failed.exit_code == 1
    assert "lm_eval ended with" in failed.output
