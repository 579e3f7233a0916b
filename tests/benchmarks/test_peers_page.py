"""Tools of the page about peers: what is read of `perf`, and a page of the runs that are there."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import peers as page
from benchmarks.peer_profile import parse
from llm_worker_bench.results import Recorder, Result

REPORT = """
# Overhead|Shared Object|Symbol
 67.13% |mistralrs.abi3.so |[.] <candle_core::quantized::k_quants::BlockQ4_1 as a::GgmlType>::vec_dot_unopt   |-      -
  6.50% |mistralrs.abi3.so |[.] std::sys::backtrace::__rust_begin_short_backtrace::<x::{closure#0}<y>, ()>
  5.00% |libgomp.so.1.0.0  |[.] 0x000000000001da30 |- -
  2.50% |libgomp.so.1.0.0  |[.] 0x000000000001da3c
  0.50% |llama-bench       |[.] ggml_vec_dot_q4_1_q8_1
"""


def test_perf_report_is_summed_by_short_name() -> None:
    found = parse(REPORT)
    assert {name: round(share, 4) for name, share in found.items()} == {
        "BlockQ4_1::vec_dot_unopt": 0.6713, "libgomp.so.1.0.0": 0.075, "backtrace::__rust_begin_short_backtrace": 0.065,
        "ggml_vec_dot_q4_1_q8_1": 0.005,
    }  # fmt: skip
    assert list(found)[1] == "libgomp.so.1.0.0"  # largest first


def test_page_has_the_parts_whose_runs_are_there(tmp_path: Path) -> None:
    recorder = Recorder("peers", {"threads": 2})
    for name, rates in {"llm-worker-rbee": [200.0, 202.0], "llama-bench": [100.0, 101.0]}.items():
        fields = {"peer": name, "version": "1", "ours_over_peer": 2.0, "ratio_interval": [1.9, 2.1]}
        recorder.add_result(Result.from_samples(f"q4_0 pp128/{name}", "tok/s", rates, "higher", **fields))
    recorder.details["peers"] = {"llama-bench": {"version": "build 7", "settings": {"n_threads": 2}}}
    recorder.details["failed"] = {"7b mistral.rs": "mistral.rs: ValueError: unknown type"}
    text = page.markdown({"machine/peers-mistralrs.json.gz": recorder.to_run()})
    assert "| Q4_0 pp128 | 201 (200 to 202) | 100 (100 to 101) | - | **2.00** (1.90 to 2.10) | - |" in text
    assert "- llama-bench build 7: n_threads 2" in text
    assert "- failed: 7b mistral.rs: mistral.rs: ValueError: unknown type" in text
    assert "## How often the weights are read" in text
    assert "## On a GPU" not in text
    assert "Threads that wait" not in text
    assert page.markdown({}).startswith("# Why other programs differ in speed")
