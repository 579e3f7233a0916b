"""The attention pass beside the shares of the Rust worker."""

from __future__ import annotations

from llm_worker_bench.profile import attention_pass, report
from llm_worker_bench.results import Recorder, Result, Run

SECONDS = {
    "reference": {
        "qkv": 60,
        "rope": 6,
        "kv_write": 2,
        "scores": 8,
        "kv_read": 4,
        "mask": 1,
        "softmax": 9,
        "values": 10,
    },
    "cpu": {"qkv": 30, "rope_kv_write": 5, "rope_angles": 1, "attention": 13, "attention_split": 1, "output": 70},
}


def planted() -> Run:
    recorder = Recorder("profile", {"attention_pass": True})
    for backend, parts in SECONDS.items():
        recorder.add_result(Result.from_samples("prefill/step", "s", [0.2] * 3, backend=backend, tokens=128))
        for name, seconds in parts.items():
            fields = {"backend": backend, "share": seconds / 200, "class": "critical", "calls": 1}
            recorder.add_result(Result.from_samples(f"prefill/{name}", "s", [seconds / 1e3] * 3, **fields))
    return recorder.to_run()


def test_rows_divide_by_the_pass_alone() -> None:
    head, *rows = attention_pass.rows(planted())
    assert head == ["part of the pass", "original", "reference", "cpu"]
    assert {row[0]: row[2:] for row in rows} == {
        "QKV": ["60.0%", "60.0%"],
        "RoPE (ours with the KV write)": ["8.0%", "12.0%"],
        "scores": ["12.0%", "in one kernel"],
        "mask": ["1.0%", "in one kernel"],
        "softmax and output": ["19.0%", "in one kernel"],
        "scores to output together": ["32.0%", "28.0%"],
        "whole pass (the original: from its QKV)": ["100 ms", "50.00 ms"],
    }


def test_original_shares_sum_to_the_pass() -> None:
    assert round(sum(attention_pass.ORIGINAL.values()), 6) == 1


def test_markdown_has_the_pass_and_a_section_for_each_backend() -> None:
    text = report.markdown(planted())
    assert "| QKV | 61.2% | 60.0% | 60.0% |" in text
    assert "## Prefill on reference" in text
    assert "## Prefill on cpu" in text
